"""Pictures from bytes, arrays and PIL images: checked, upright, RGB."""

# Generated from nbs/multimodal/images.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# not MPO, as PIL calls the JPEG files of phones: their first picture is the one that is meant
SEVERAL_FRAMES = ("PNG", "WEBP", "GIF", "TIFF")
MAX_PIXELS = 64_000_000  # 192 MB as RGB


class MediaError(ValueError):
    """A picture or clip that cannot be used; says why."""


def decode_image(data: bytes, max_pixels: int = MAX_PIXELS) -> "Image":
    """The picture in a file's bytes, as RGB and upright.

    Raises:
        MediaError: no picture of a format in `FORMATS`, more than `max_pixels`, animated, or broken.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged files, and of sizes: the limit is ours, and lower
            picture = Image.open(io.BytesIO(data), formats=FORMATS)
            _check_size(picture, max_pixels)
            if picture.format in SEVERAL_FRAMES and _has_second_frame(picture):
                raise MediaError("the picture has several frames; animated pictures are not supported")
            return to_rgb(picture)
    except UnidentifiedImageError:
        raise MediaError(f"the data are no picture in one of the formats {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError as error:
        raise MediaError(f"the picture is too large: {error}") from None
    except MediaError:
        raise
    except Exception as error:  # noqa: BLE001 - what a reader of foreign bytes raises is not ours to know
        raise MediaError(f"the picture is damaged or cut off: {error}") from None


def _has_second_frame(picture: "Image") -> bool:
    """To count all frames would take a TIFF's reader time that grows with the square of their number."""
    try:
        picture.seek(1)
    except EOFError:
        return False
    return True


def _check_size(picture: "Image", max_pixels: int) -> None:
    width, height = picture.size
    if width * height > max_pixels:
        raise MediaError(f"the picture has {width} x {height} pixels; at most {max_pixels:,} are allowed")


def to_rgb(picture: "Image") -> "Image":
    """A PIL image as RGB, turned as its EXIF data say, transparency on white.

    Raises:
        MediaError: of a mode that has no meaning here (floats, 32-bit integers).
    """
    from PIL import Image, ImageOps

    picture = ImageOps.exif_transpose(picture)
    if picture.mode == "F" or picture.mode.startswith("I"):
        values = np.asarray(picture)
        if picture.mode == "F" or values.min() < 0 or values.max() > 65535:
            raise MediaError(f"pictures of mode {picture.mode!r} are not supported, 8 and 16 bits a channel are")
        return Image.fromarray((values // 257).astype(np.uint8)).convert("RGB")
    if "A" in picture.getbands() or "transparency" in picture.info:
        above = picture.convert("RGBA")
        white = Image.new("RGBA", above.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, above).convert("RGB")
    return picture.convert("RGB")


def as_image(value: Any, max_pixels: int = MAX_PIXELS) -> "Image":
    """A picture that a caller gave, as RGB.

    Args:
        value: a PIL image, a uint8 array [height, width] or [height, width, 3 or 4], or the path of a file.

    Raises:
        TypeError: it is something else. MediaError: see `decode_image`. OSError: a file that cannot be read.
    """
    from PIL import Image

    if isinstance(value, Image.Image):
        _check_size(value, max_pixels)
        if getattr(value, "n_frames", 1) > 1:
            raise MediaError("animated pictures are not supported; give one frame, as image.copy()")
        return to_rgb(value)
    if isinstance(value, str | Path):
        return decode_image(Path(value).read_bytes(), max_pixels)
    if isinstance(value, np.ndarray):
        channels = value.shape[2] if value.ndim == 3 else 1
        if value.dtype != np.uint8 or value.ndim not in (2, 3) or (value.ndim == 3 and channels not in (3, 4)):
            raise TypeError(
                f"a picture as an array must be uint8 [height, width] or [height, width, 3 or 4],"
                f" got {value.dtype} {list(value.shape)}"
            )
        if not value.size:
            raise MediaError(f"the picture has no pixels: {list(value.shape)}")
        return as_image(Image.fromarray(value), max_pixels)
    raise TypeError(f"a picture must be a PIL image, a uint8 array or a path, got {type(value).__name__}")
