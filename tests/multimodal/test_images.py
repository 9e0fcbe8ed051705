"""Pictures that came out wrong elsewhere: right, or refused by name."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from minivllm.multimodal.images import MediaError, as_image, decode_image


def saved(image, form, **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def test_sixteen_bits_are_scaled_and_not_clipped():
    ramp = np.array([[0, 257, 30000, 65535]], np.uint16)
    assert np.asarray(decode_image(saved(Image.fromarray(ramp), "PNG")))[0, :, 0].tolist() == [0, 1, 116, 255]
    assert np.asarray(as_image(Image.fromarray(ramp.astype(np.int32))))[0, :, 1].tolist() == [0, 1, 116, 255]


@pytest.mark.parametrize("orientation, expected", [(1, (0, 0)), (3, (7, 3)), (6, (3, 0)), (8, (0, 7))])
def test_exif_turns_a_picture(orientation, expected):
    image = Image.new("RGB", (8, 4))
    image.putpixel((0, 0), (255, 0, 0))
    exif = Image.Exif()
    exif[274] = orientation
    upright = decode_image(saved(image, "PNG", exif=exif))
    assert upright.getpixel(expected) == (255, 0, 0)


def test_modes():
    clear = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    assert decode_image(saved(clear, "PNG")).getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    assert decode_image(saved(palette, "GIF")).getpixel((1, 1)) == (10, 20, 30)
    assert decode_image(saved(palette, "PNG", transparency=1)).getpixel((1, 1)) == (255, 255, 255)
    cmyk = decode_image(saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=95)).getpixel((0, 0))
    assert cmyk[0] > 245 and max(cmyk[1:]) < 10
    assert decode_image(saved(Image.new("1", (2, 2), 1), "PNG")).getpixel((0, 0)) == (255, 255, 255)
    assert decode_image(saved(Image.new("L", (1, 1), 7), "PNG")).getpixel((0, 0)) == (7, 7, 7)


def bomb():
    """A PNG whose header says 40000 x 40000."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 40000, 40000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0" * 100)) + chunk(b"IEND", b"")
    )


FRAMES = [Image.new("RGB", (4, 4), colour) for colour in ("red", "green", "blue")]
BAD = {
    "text": (b"no picture", "no picture in one of the formats"),
    "empty": (b"", "no picture in one of the formats"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no picture in one of the formats"),
    "truncated png": (saved(Image.effect_noise((64, 64), 50), "PNG")[:900], "damaged or cut off"),
    "truncated jpeg": (saved(Image.effect_noise((64, 64), 50), "JPEG")[:400], "damaged or cut off"),
    "animated gif": (saved(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), "several frames"),
    "animated webp": (saved(FRAMES[0].convert("RGB"), "WEBP", save_all=True, append_images=FRAMES[1:2]), "several frames"),
    "pages": (saved(FRAMES[0], "TIFF", save_all=True, append_images=FRAMES[1:2]), "several frames"),
    "bomb": (bomb(), "too large|40000 x 40000 pixels"),
    "float tiff": (saved(Image.new("F", (2, 2)), "TIFF"), "mode 'F'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_pictures_are_refused_by_name(name):
    data, words = BAD[name]
    with pytest.raises(MediaError, match=words):
        decode_image(data)


def test_the_pages_of_a_tiff_are_not_counted(monkeypatch):
    """That takes time which grows with the square of their number."""
    monkeypatch.setattr(TiffImagePlugin.TiffImageFile, "n_frames", property(lambda self: 1 / 0))
    with pytest.raises(MediaError, match="several frames"):
        decode_image(BAD["pages"][0])
    monkeypatch.undo()
    assert decode_image(saved(FRAMES[0], "TIFF")).size == (4, 4)


def test_the_first_picture_of_a_phones_file_is_the_picture():
    data = saved(FRAMES[0], "MPO", save_all=True, append_images=FRAMES[1:2])
    red, green, _ = decode_image(data).getpixel((0, 0))
    assert red > 200 and green < 50


@pytest.mark.parametrize("tag", [256, 259, 282])
def test_exif_of_the_wrong_kind_is_no_error_of_ours(tag):
    """A text where a number belongs, and an orientation that wants the picture turned."""
    entries = struct.pack("<HHI4s", tag, 2, 2, b"a\0\0\0") + struct.pack("<HHIHH", 274, 3, 1, 6, 0)
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + entries + bytes(4)
    try:
        assert decode_image(saved(Image.new("RGB", (8, 4)), "JPEG", exif=exif)).size in ((4, 8), (8, 4))
    except MediaError as error:
        assert "damaged" in str(error)


def test_the_limit_of_pixels_is_checked_before_decoding():
    data = saved(Image.new("L", (300, 200)), "PNG")
    assert decode_image(data, 60_000).size == (300, 200)
    with pytest.raises(MediaError, match="300 x 200 pixels; at most 59,999"):
        decode_image(data[:60], 59_999)


def test_damaged_bytes_never_raise_anything_else():
    rng = np.random.default_rng(0)
    for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"):
        whole = np.frombuffer(saved(Image.effect_noise((16, 16), 50).convert("RGB"), form), np.uint8)
        for _ in range(40):
            data = whole.copy()
            data[rng.integers(0, len(data), 4)] = rng.integers(0, 256, 4)
            try:
                decode_image(data[: rng.integers(1, len(data) + 1)].tobytes(), 10_000)
            except MediaError:
                pass
