"""Pictures, clips and embeddings over HTTP, with the official client: the same answers as transformers, and bad ones refused by name."""

import base64
import io
import pickle
import wave
import zipfile

import numpy as np
import openai
import pytest
import torch
from live_server import live_server
from PIL import Image
from tiny_vlms import clip, greedy, picture, processor, save_vlm, vlm

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
                      limit_mm_per_prompt={"image": 2}, enable_prompt_embeds=True, enable_mm_embeds=True)  # fmt: skip
    options = ServerOptions(
        served_model_name=["tiny"], allowed_local_media_path=str(served[1]), max_image_pixels=100_000,
        enable_prompt_tokens_details=True, allowed_media_domains=["127.0.0.1"],
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


def test_sixteen_bits_and_four_inks_are_seen_as_they_are(server):
    grey, wide = picture(6).convert("L"), np.asarray(picture(6).convert("L")).astype(np.uint16) * 257
    inks = picture(6).convert("CMYK")
    for data, image in (
        (saved(Image.fromarray(wide)), grey.convert("RGB")),
        (saved(inks, "TIFF"), inks.convert("RGB")),
    ):
        assert ask(server, parts((url(data),))).choices[0].model_extra["token_ids"] == expected("<image>", [image])[1]


def test_a_phone_picture_is_turned(server):
    exif = Image.Exif()
    exif[274] = 6
    lying = saved(picture(5, 60, 20), exif=exif)
    upright = picture(5, 60, 20).transpose(Image.Transpose.ROTATE_270)
    assert ask(server, parts((url(lying),))).choices[0].model_extra["token_ids"] == expected("<image>", [upright])[1]


def sound(samples, form="wav"):
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, 16_000, 0, "NONE", ""))
        out.writeframes(np.round(samples * 32767).astype("<i2").tobytes())
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file.getvalue()).decode(), "format": form}}


def tensor(value, save=torch.save):
    """A tensor as a client of vLLM sends it."""
    file = io.BytesIO()
    save(value, file)
    return base64.b64encode(file.getvalue()).decode()


def test_embeddings_in_the_place_of_a_picture(server):
    pixels = processor("llava").image_processor(images=[picture(0)], return_tensors="pt").pixel_values
    with torch.no_grad():
        rows = vlm("llava").model.get_image_features(pixels).pooler_output[0]
    want = expected("<image>what?", [picture(0)])[1]
    for form in (tensor(rows), {"image_embeds": tensor(rows)}):
        content = [{"type": "image_embeds", "image_embeds": form}, {"type": "text", "text": "what?"}]
        assert ask(server, content).choices[0].model_extra["token_ids"] == want
    for form, words in (
        ("no base64!", "the tensor is not base64"),
        (tensor(rows[:, :8]), r"shape .at least 1, 64., got .16, 8."),
        ({"image_embeds": tensor(rows), "image_grid_thw": tensor(torch.ones(1, 3))}, "have no grid"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            ask(server, [{"type": "image_embeds", "image_embeds": form}])


def complete(server, embeds, prompt="", **more):
    body = {"prompt_embeds": embeds, "return_token_ids": True, "ignore_eos": True} | more
    answer = server.client().completions.create(
        model="tiny", prompt=prompt, max_tokens=5, temperature=0, extra_body=body
    )
    return [choice.model_extra["token_ids"] for choice in answer.choices]


def test_embeddings_in_the_place_of_a_prompt(server):
    texts = "a text without a picture", "another"
    rows = [vlm("llava").get_input_embeddings()(processor("llava").tokenizer(t, return_tensors="pt").input_ids)[0].detach() for t in texts]  # fmt: skip
    want = [greedy("llava", text, [], 5)[1] for text in texts]
    assert complete(server, tensor(rows[0])) == want[:1]
    assert complete(server, [tensor(row[None]) for row in rows]) == want
    assert complete(server, tensor(rows[0].double()), prompt=texts[1]) == want
    body = {"model": "tiny", "prompt_embeds": tensor(rows[0]), "max_tokens": 1}
    assert server.post("/v1/completions", body).status_code == 200
    for more, words in (({"echo": True}, "has no text"), ({"prompt_logprobs": 1}, "needs a prompt of tokens")):
        with pytest.raises(openai.BadRequestError, match=words):
            complete(server, tensor(rows[0]), **more)


class Evil:
    def __reduce__(self):
        return (print, ("run",))


def zipped(value, file):
    """What `torch.save` writes, compressed."""
    plain = io.BytesIO()
    torch.save(value, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))


def room(_, file):
    """A file of some hundred bytes that asks for a gigabyte."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02cbuiltins\nbytearray\nJ" + (10**9).to_bytes(4, "little") + b"\x85R.")
        archive.writestr("a/version", "3")


@pytest.mark.parametrize(
    "text, words",
    [
        ("no base64!", "is not base64"),
        (base64.b64encode(b"text").decode(), "no tensor that torch.save wrote"),
        (tensor(Evil()), "no tensor that torch.save wrote"),
        (tensor(Evil(), pickle.dump), "no tensor that torch.save wrote"),
        (tensor(torch.zeros(64, 64), zipped), "it is compressed"),
        (tensor([torch.zeros(3, 64)]), "must be one dense tensor, got list"),
        (tensor(torch.eye(64).to_sparse()), "must be one dense tensor"),
        (tensor(torch.zeros(1, 64, device="meta")), "must be one dense tensor"),
        (tensor(torch.zeros(1).expand(10**9, 64)), "more elements than the data"),
        (tensor(torch.zeros(3, 64, dtype=torch.int64)), "of floats"),
        (tensor(torch.zeros(3, 8)), "must have shape"),
        (tensor(b"", room), "pickle names builtins.bytearray"),
        (tensor(torch._neg_view(torch.ones(3, 64))), "must be one dense tensor"),
        (tensor(torch.nested.nested_tensor([torch.zeros(3, 64)])), "must be one dense tensor"),
        (tensor(torch.full((3, 64), 1e5)), "beyond 65,504"),
        (tensor(torch.full((3, 64), torch.nan)), "not finite"),
        (tensor(torch.zeros(257, 64)), "max_model_len=256"),
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_refused_by_name(server, text, words, capfd):
    with pytest.raises(openai.BadRequestError, match=words):
        complete(server, text)
    assert capfd.readouterr().out == ""


def test_embeddings_must_be_allowed(tiny):
    with pytest.raises(openai.BadRequestError, match="--enable-prompt-embeds allows them"):
        tiny.client().completions.create(
            model="tiny", prompt="", extra_body={"prompt_embeds": tensor(torch.zeros(3, 64))}
        )
    answer = tiny.post("/v1/completions", {"model": "tiny"})
    assert answer.status_code == 400 and "at least one prompt" in answer.text


def test_clips_in_a_conversation(tmp_path):
    args = EngineArgs(
        model=str(save_vlm("qwen2_audio", tmp_path)), dtype="float32", max_model_len=256, num_gpu_blocks=80
    )
    with live_server(args, ServerOptions(served_model_name=["tiny"])) as hears:
        whole = np.round(clip(0, 300) * 32767).astype(np.float32) / 32768
        prompt = "<|im_start|>user\nwhat is<|AUDIO|>this?<|im_end|>\n<|im_start|>assistant\n"
        text = [{"type": "text", "text": t} for t in ("what is", "this?")]
        answer = ask(hears, [text[0], sound(clip(0, 300)), text[1]])
        assert answer.choices[0].model_extra["token_ids"] == greedy("qwen2_audio", prompt, [whole], 5)[1]
        for part, words in (
            (sound(clip(0, 90), "mp3"), "format='mp3' is not supported"),
            (sound(clip(0, 2500)), "2.5 seconds; this model hears at most 2"),
            ({"type": "input_audio", "input_audio": {"data": "SUQz", "format": "wav"}}, "no WAV file"),
            ({"type": "input_audio", "input_audio": {"data": "?", "format": "wav"}}, "not base64"),
            (parts((url(saved(picture(0))),))[0], "takes 'audio' alone, got 'image'"),
            ({"type": "image_embeds", "image_embeds": "AA"}, "--enable-mm-embeds allows them"),
        ):
            with pytest.raises(openai.BadRequestError, match=words):
                ask(hears, [part])
        assert ask(hears, "still there?").choices[0].finish_reason == "length"


FRAMES = [Image.new("RGB", (4, 4), colour) for colour in ("red", "green")]
BAD = [
    ((url(b"text"),), "no picture in one of the formats"),
    ((url(saved(picture(0))[:200]),), "damaged or cut off"),
    ((url(saved(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:])),), "several frames"),
    ((url(saved(Image.new("L", (400, 300)))),), "400 x 300 pixels; at most 100,000"),
    ((url(saved(Image.new("L", (1, 4000)))),), "1 x 4000 pixels; one side may have at most 200 times"),
    (("http://169.254.169.254/latest/meta-data",), "--allowed-media-domains"),
    (("http://127.0.0.1:9/x.png",), "an address of a private network"),
    (("file:///etc/passwd",), "not one of the folder"),
    (("x",), "must begin with data:"),
]


@pytest.mark.parametrize("part, words", BAD)
def test_bad_pictures_get_400_and_nothing_else_happens(server, part, words):
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        ask(server, parts("look", part))
    assert caught.value.param.startswith("messages")


def test_calls_and_results_are_text_beside_pictures(server):
    """The template lists parts and knows no tools: calls and results are written as text, pictures in a result stay pictures."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    head = [{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": [call]}]
    shown = []
    for result in ("42", parts("see", (url(saved(picture(0))),))):
        messages = [*head, {"role": "tool", "tool_call_id": "c", "content": result}]
        answer = server.client().chat.completions.create(
            model="tiny", messages=messages, **HOW | {"extra_body": {"return_token_ids": True}}
        )
        shown.append(answer.usage.prompt_tokens)
        assert answer.choices[0].finish_reason == "length"
    assert shown[1] > shown[0] + 3


def test_counts_and_other_media_are_refused_by_name(server):
    one = (url(saved(picture(0))),)
    with pytest.raises(openai.BadRequestError, match="3 images; at most 2"):
        ask(server, parts(one, one, one))
    with pytest.raises(openai.BadRequestError, match="257 pictures and clips are too many for max_model_len=256"):
        ask(server, parts(*[one] * 257))
    half = (url(saved(Image.new("L", (250, 250)))),)
    with pytest.raises(openai.BadRequestError, match="at most 37,500"):
        ask(server, parts(half, half))
    with pytest.raises(openai.BadRequestError, match="'<image>', which stands for an image"):
        ask(server, parts(one, "and <image>"))
    with pytest.raises(openai.BadRequestError, match="<image>"):
        ask(server, "a marker <image> without a picture")
    with pytest.raises(openai.BadRequestError, match="takes 'image' alone, got 'audio'"):
        ask(server, [sound(clip(0, 90))])
    body = {"model": "tiny", "messages": [{"role": "user", "content": parts(one)}]}
    answer = server.post("/tokenize", body)
    assert answer.status_code == 400 and "not supported here" in answer.text


def test_a_model_of_text_alone_says_so(tiny):
    messages = [{"role": "user", "content": parts((url(saved(picture(0))),))}]
    with pytest.raises(openai.BadRequestError, match="reads text alone"):
        tiny.client().chat.completions.create(model="tiny", messages=messages)


def test_the_server_is_unharmed(server):
    assert ask(server, "still there?").choices[0].finish_reason == "length"
