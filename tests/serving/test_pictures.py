"""Pictures over HTTP, with the official client: the same answers as transformers, and bad ones refused by name."""

import base64
import io

import openai
import pytest
from live_server import live_server
from PIL import Image
from tiny_vlms import greedy, picture, save_vlm

from minivllm.core.config import EngineArgs
from minivllm.serving.app import ServerOptions

HOW = {"max_tokens": 5, "temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}


def saved(image, form="PNG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def url(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


def parts(*contents):
    """Texts, and the URLs of pictures in tuples."""
    return [
        {"type": "image_url", "image_url": {"url": c[0], "detail": "low"}}
        if isinstance(c, tuple)
        else {"type": "text", "text": c}
        for c in contents
    ]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    (root / "media").mkdir()
    picture(3).save(root / "media" / "a.png")
    return save_vlm("llava", root / "llava"), root / "media"


@pytest.fixture(scope="module", params=["thread", "process"])
def server(request, served):
    args = EngineArgs(model=str(served[0]), dtype="float32", max_model_len=256, num_gpu_blocks=80, max_num_seqs=4,
                      limit_mm_per_prompt={"image": 2})  # fmt: skip
    options = ServerOptions(
        served_model_name=["tiny"], allowed_local_media_path=str(served[1]), max_image_pixels=100_000,
        enable_prompt_tokens_details=True,
    )  # fmt: skip
    with live_server(args, options, engine_in=request.param) as running:
        yield running


def ask(server, content, **more):
    messages = [{"role": "user", "content": content}]
    return server.client().chat.completions.create(model="tiny", messages=messages, **HOW | more)


def expected(text, images):
    prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return greedy("llava", prompt, images, 5)


def test_pictures_in_a_conversation(server, served):
    a, b = picture(0), picture(1, 200, 40)
    for content, text, images in (
        (parts((url(saved(a)),), "what?"), "<image>what?", [a]),
        (parts("first", (url(saved(a)),), "then", (url(saved(b)),)), "first<image>then<image>", [a, b]),
        ("no picture", "no picture", []),
        (parts((f"file://{served[1]}/a.png",)), "<image>", [picture(3)]),
    ):
        ids, new, _ = expected(text, images)
        answer = ask(server, content)
        assert answer.choices[0].model_extra["token_ids"] == new
        assert answer.usage.prompt_tokens == len(ids)
    again = ask(server, parts((url(saved(a)),), "what?"))
    assert again.usage.prompt_tokens_details.cached_tokens >= 16
    pieces = list(ask(server, parts((url(saved(a)),), "what?"), stream=True))
    tokens = [t for piece in pieces if piece.choices for t in piece.choices[0].model_extra.get("token_ids") or ()]
    assert tokens == expected("<image>what?", [a])[1]


def test_a_phone_picture_is_turned(server):
    exif = Image.Exif()
    exif[274] = 6
    lying = saved(picture(5, 60, 20), exif=exif)
    upright = picture(5, 60, 20).transpose(Image.Transpose.ROTATE_270)
    assert ask(server, parts((url(lying),))).choices[0].model_extra["token_ids"] == expected("<image>", [upright])[1]


FRAMES = [Image.new("RGB", (4, 4), colour) for colour in ("red", "green")]
BAD = [
    ((url(b"text"),), "no picture in one of the formats"),
    ((url(saved(picture(0))[:200]),), "damaged or cut off"),
    ((url(saved(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:])),), "2 frames"),
    ((url(saved(Image.new("L", (400, 300)))),), "400 x 300 pixels; at most 100,000"),
    (("http://169.254.169.254/latest/meta-data",), "--allowed-media-domains"),
    (("file:///etc/passwd",), "not one of the folder"),
    (("x",), "must begin with data:"),
]


@pytest.mark.parametrize("part, words", BAD)
def test_bad_pictures_get_400_and_nothing_else_happens(server, part, words):
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        ask(server, parts("look", part))
    assert caught.value.param == "messages[0]"


def test_counts_and_other_media_are_refused_by_name(server):
    one = (url(saved(picture(0))),)
    with pytest.raises(openai.BadRequestError, match="3 pictures; at most 2"):
        ask(server, parts(one, one, one))
    half = (url(saved(Image.new("L", (250, 250)))),)
    with pytest.raises(openai.BadRequestError, match="at most 37,500"):
        ask(server, parts(half, half))
    with pytest.raises(openai.BadRequestError, match="'<image>', which stands for an image"):
        ask(server, parts(one, "and <image>"))
    with pytest.raises(openai.BadRequestError, match="<image>"):
        ask(server, "a marker <image> without a picture")
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    with pytest.raises(openai.BadRequestError, match="input_audio"):
        ask(server, [sound])
    body = {"model": "tiny", "messages": [{"role": "user", "content": parts(one)}]}
    answer = server.post("/tokenize", body)
    assert answer.status_code == 400 and "not supported here" in answer.text


def test_a_model_of_text_alone_says_so(tiny):
    messages = [{"role": "user", "content": parts((url(saved(picture(0))),))}]
    with pytest.raises(openai.BadRequestError, match="reads text alone"):
        tiny.client().chat.completions.create(model="tiny", messages=messages)


def test_the_server_is_unharmed(server):
    assert ask(server, "still there?").choices[0].finish_reason == "length"
