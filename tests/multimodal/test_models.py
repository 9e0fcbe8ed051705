"""Models that read pictures or hear equal transformers' own, whatever the scheduler does with them."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_vlms import VLMS, clip, greedy, marker, modality, picture, processor, save_vlm, vlm

from minivllm import LLM, SamplingParams
from minivllm.core.scheduler import Swap

COUNT = 6
PARAMS = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=0, prompt_logprobs=0)
PLAIN = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("vlms"), {}
    return lambda name: made.get(name) or made.setdefault(name, str(save_vlm(name, root / name)))


@pytest.fixture(scope="module")
def shared(folder):
    """One engine a family, which schedules a step while the last one runs."""
    made = {}
    return lambda name: made.get(name) or made.setdefault(name, engine(folder(name), async_scheduling=True))


def media(name):
    if modality(name) == "audio":
        return clip(0, 500), clip(1, 1000), clip(2, 90), clip(3, 500)
    return picture(0), picture(1, 200, 40), picture(2, 30, 70), picture(3)


def prompts(name):
    """0, 1 and 3 pictures or clips of unequal size, in texts of unequal length."""
    m, (a, b, c, _) = marker(name), media(name)
    return [
        ("no picture at all here", []),
        (f"{m}what is it?", [a]),
        (f"first {m} and then {m}, between them words, {m} and a long tail of text", [b, a, c]),
        (f"again {m}", [b]),
    ]


def engine(path, **settings):
    fixed = {"dtype": "float32", "max_model_len": 256, "num_gpu_blocks": 80, "max_num_seqs": 4, "block_size": 8}
    fixed |= {"enable_mm_embeds": True, "encoder_cache_size": 400}
    preemption = settings.pop("preemption", None)
    return LLM(path, **fixed | settings, preemption=preemption)


def ask(llm, cases, params=PLAIN):
    kind = llm.llm_engine.input_processor.media.spec.modality
    return llm.generate([{"prompt": t, "multi_modal_data": {kind: i}} for t, i in cases], params)


def tokens(outputs):
    return [o.outputs[0].token_ids for o in outputs]


@pytest.mark.parametrize("name", VLMS)
def test_a_ragged_batch_equals_transformers(name, shared):
    llm = shared(name)
    for (text, images), out in zip(prompts(name), ask(llm, prompts(name), PARAMS), strict=True):
        ids, new, expected = greedy(name, text, images, COUNT)
        assert out.prompt_token_ids == ids and out.outputs[0].token_ids == new
        entries = [*out.prompt_logprobs[1:], *out.outputs[0].logprobs]
        got = [entry[token].logprob for entry, token in zip(entries, (ids + new)[1:], strict=True)]
        want = expected[torch.arange(len(got)), torch.tensor((ids + new)[1:])]
        assert (torch.tensor(got) - want).abs().max() < 1e-4


# embeddings: room for one input
CACHE = {
    "llava": 20,
    "gemma3": 4,
    "idefics3": 20,
    "qwen2_5_vl": 26,
    "qwen2_audio": 26,
    "llava-siglip": 20,
    "smolvlm": 20,
}
BLOCKS = {  # and the longest length that they hold
    "llava": (21, 144),
    "gemma3": (41, 144),
    "idefics3": (34, 240),
    "qwen2_5_vl": (21, 160),
    "qwen2_audio": (21, 144),
    "llava-siglip": (21, 144),
    "smolvlm": (34, 240),
}
SETTINGS = {
    "chunks": {"max_num_batched_tokens": 36, "long_prefill_token_threshold": 5},
    "a full encoder cache": {"encoder_cache_size": CACHE, "max_num_batched_tokens": 200},
    "preemption": {"num_gpu_blocks": BLOCKS},
    "swaps": {"num_gpu_blocks": BLOCKS, "preemption": Swap(12)},
    "async, radix": {"async_scheduling": True, "prefix_cache_index": "radix", "max_num_batched_tokens": 40},
    "reference": {"attention_backend": "reference", "max_num_batched_tokens": 50},
}


LEAST = ("chunks", "a full encoder cache", "preemption")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (name, settings)
        for name in BLOCKS
        for settings in (SETTINGS if name in ("llava", "gemma3", "idefics3") else LEAST)
    ],
)
def test_however_it_is_scheduled(name, settings, folder):
    changes = dict(SETTINGS[settings])
    if "encoder_cache_size" in changes:
        changes["encoder_cache_size"] = CACHE[name]
    if "num_gpu_blocks" in changes:
        blocks, length = BLOCKS[name]
        changes |= {"num_gpu_blocks": blocks, "max_model_len": length, "scheduler_reserve_full_isl": False}
    llm = engine(folder(name), **changes)
    expected = [greedy(name, text, images, COUNT)[1] for text, images in prompts(name)]
    with llm.llm_engine.record() as trace:
        assert tokens(ask(llm, prompts(name))) == expected
        assert tokens(ask(llm, prompts(name)[::-1])) == expected[::-1]
    trace.check()
    reasons = {event[-1] for event in trace.events if event[0] in ("chunk", "wait")}
    assert ("encoder_cache_size" in changes) == ("encoder_cache" in reasons)


@pytest.mark.parametrize("name", VLMS)
def test_hits_with_the_same_picture_and_not_with_another(name, shared):
    llm, m, (one, _, _, other) = shared(name), marker(name), media(name)
    first, second = f"{m} what is it, then?", f"{m} and what colour?"
    ask(llm, [(first, [one])])
    before = llm.llm_engine.input_processor.media.hits
    for images, hit in (([one], True), ([other], False)):
        (out,) = ask(llm, [(second, images)])
        assert out.outputs[0].token_ids == greedy(name, second, images, COUNT)[1]
        assert (out.num_cached_tokens >= 8) is hit
    assert llm.llm_engine.input_processor.media.hits == before + 1


def abort(llm, name, steps):
    """Three of the four requests finish, and their tokens; the other one is aborted after this many steps."""
    core, kind = llm.llm_engine, modality(name)
    for i, (text, images) in enumerate(prompts(name)):
        core.add_request(str(i), {"prompt": text, "multi_modal_data": {kind: images}}, PLAIN)
    for _ in range(steps):
        core.step()
    yield list(core.core.scheduler.encoder_cache.held.get("2", []))
    core.abort_request("2")
    done = {}
    while core.has_unfinished_requests():
        done |= {o.request_id: o.outputs[0].token_ids for o in core.step() if o.finished}
    assert done == {str(i): greedy(name, *prompts(name)[i], COUNT)[1] for i in (0, 1, 3)}
    assert not core.core.scheduler.encoder_cache.held
    yield []


@pytest.mark.parametrize("name", VLMS)
def test_an_abort_while_the_encoder_runs_leaves_the_others_alone(name, shared):
    llm = shared(name)
    llm.reset_prefix_cache()
    held, _ = abort(llm, name, 1)  # the first step has begun, and no result of it is known
    assert len(held) == 3


def test_an_abort_between_two_pictures_leaves_the_others_alone(folder):
    held, _ = abort(engine(folder("llava"), max_num_batched_tokens=20), "llava", 3)
    assert len(held) in (1, 2)


def test_token_ids_embeddings_and_other_forms_of_a_picture(folder):
    llm, image = engine(folder("llava")), picture(0)
    ids = processor("llava").tokenizer("<image>what is it?").input_ids
    expected = greedy("llava", "<image>what is it?", [image], COUNT)[1]
    pixels = processor("llava").image_processor(images=[image], return_tensors="pt").pixel_values
    with torch.no_grad():
        rows = vlm("llava").model.get_image_features(pixels).pooler_output[0]
    for prompt, given in (
        ({"prompt_token_ids": ids}, image),
        ({"prompt": "<image>what is it?"}, np.asarray(image)),
        ({"prompt": "<image>what is it?"}, rows),
    ):
        assert tokens(llm.generate([prompt | {"multi_modal_data": {"image": given}}], PLAIN)) == [expected]


def test_embeddings_of_a_picture_with_a_grid_and_of_a_clip(shared):
    image, llm = picture(0), shared("qwen2_5_vl")
    made = processor("qwen2_5_vl").image_processor(images=[image], return_tensors="pt")
    with torch.no_grad():
        rows = vlm("qwen2_5_vl").model.get_image_features(**made).pooler_output[0]
    grid, prompt = made["image_grid_thw"], "<image>what is it?"
    given = {"image_embeds": rows, "image_grid_thw": grid}
    assert tokens(ask(llm, [(prompt, [given])])) == [greedy("qwen2_5_vl", prompt, [image], COUNT)[1]]
    for wrong, error in (
        (rows, "20 embeddings need image_grid_thw"),
        (given | {"image_grid_thw": grid + 2}, "20 embeddings need image_grid_thw"),
        (given | {"image_grid_thw": grid.float()}, "20 embeddings need image_grid_thw"),
        (given | {"more": 1}, "got the fields .*more"),
    ):
        with pytest.raises(ValueError, match=error):
            ask(llm, [(prompt, [wrong])])
    llm, rows = shared("qwen2_audio"), torch.randn(5, 64)
    (out,) = ask(llm, [("<|AUDIO|>what is it?", [rows])])
    assert out.prompt_token_ids == [260] * 5 + processor("qwen2_audio").tokenizer("what is it?").input_ids
    with pytest.raises(ValueError, match="has no grid|have no grid"):
        ask(llm, [("<|AUDIO|>", [{"audio_embeds": rows, "image_grid_thw": [1, 2, 2]}])])


@pytest.mark.parametrize(
    "clips, error",
    [
        ([clip(0, 2001)], "audio 0: the clip lasts 2.0 seconds; this model hears at most 2"),
        ([clip(0, 100), clip(0, 5)], "audio 1: the audio is too short"),
        ([picture(0)], "audio 0: .*must be an array"),
        ([], "1 times '<.AUDIO.>', which stands for an audio, and there are 0 audios"),
    ],
)
def test_clips_that_do_not_fit_are_refused(shared, clips, error):
    with pytest.raises((TypeError, ValueError), match=error):
        ask(shared("qwen2_audio"), [("<|AUDIO|>" * max(1, len(clips)), clips)])


def test_an_older_checkpoint_has_other_names(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    for file in ("config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{folder('llava')}/{file}", tmp_path / file)
    old = {
        (name.replace("vision_tower.", "vision_tower.vision_model.") if "vision_model" not in name else name): tensor
        for name, tensor in load_file(f"{folder('llava')}/model.safetensors").items()
    }
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    (case,) = prompts("llava")[1:2]
    assert tokens(ask(engine(str(tmp_path)), [case])) == [greedy("llava", *case, COUNT)[1]]
    save_file({k: v for k, v in old.items() if "linear_2" not in k}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="lacks multi_modal_projector.linear_2"):
        engine(str(tmp_path))


@pytest.mark.parametrize(
    "prompt, error",
    [
        ({"prompt": "<image>"}, "1 times '<image>', which stands for an image, and there are 0 images"),
        ({"prompt": "a", "multi_modal_data": {"image": picture(0)}}, "0 times '<image>'"),
        ({"prompt": "a", "multi_modal_data": {"video": picture(0)}}, "takes 'image' alone, got 'video'"),
        ({"prompt": "a", "multi_modal_data": picture(0)}, "must be a dict"),
        ({"prompt": "<image>" * 4, "multi_modal_data": {"image": [picture(0)] * 4}}, "4 images in one prompt; limit_mm_per_prompt allows 3"),
        ({"prompt": "<image>", "multi_modal_data": {"image": np.zeros((4, 4, 3), np.float32)}}, "image 0: .*must be uint8"),
        ({"prompt": "<image>", "multi_modal_data": {"image": 7}}, "image 0: .*got int"),
        ({"prompt": "<image>", "multi_modal_data": {"image": torch.zeros(3, 5)}}, "shape .at least 1, 64., got .3, 5."),
        ({"prompt": "<image>", "multi_modal_data": {"image": {"image_embeds": 3}}}, "must be a tensor or array"),
        ({"prompt_embeds": torch.zeros(3, 64), "multi_modal_data": {"image": picture(0)}}, "neither 'prompt' nor media"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(folder, prompt, error):
    global _llm
    try:
        llm = _llm
    except NameError:
        llm = _llm = engine(folder("llava"), limit_mm_per_prompt={"image": 3})
    with pytest.raises((TypeError, ValueError), match=error):
        llm.generate([prompt], PLAIN)


def test_embeddings_must_be_allowed(folder):
    llm = engine(folder("llava"), enable_mm_embeds=False)
    with pytest.raises(ValueError, match="image_embeds are not allowed here .enable_mm_embeds=True"):
        ask(llm, [("<image>", [torch.zeros(3, 64)])])
    with pytest.raises(ValueError, match="prompt_embeds are not allowed here .enable_prompt_embeds=True"):
        llm.generate([{"prompt_embeds": torch.zeros(3, 64)}], PLAIN)


def test_a_model_of_text_alone_says_so(tmp_path):
    from tiny_models import save_tiny_model

    llm = LLM(str(save_tiny_model("llama", tmp_path)), dtype="float32", max_model_len=64, num_gpu_blocks=20)
    with pytest.raises(ValueError, match="reads text alone"):
        llm.generate([{"prompt": "a", "multi_modal_data": {"image": Image.new("RGB", (4, 4))}}], PLAIN)


def test_two_threads_with_one_picture_keep_it_once(shared, monkeypatch):
    """Both miss the cache before either has put the picture there."""
    made = shared("llava").llm_engine.input_processor.media
    read, both = made.reader, threading.Barrier(2, timeout=10)

    def reader(*args, **options):
        both.wait()
        return read(*args, **options)

    monkeypatch.setattr(made, "reader", reader)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda image: made.load({"image": [image]})[0], [picture(77)] * 2)
    assert first.identifier == second.identifier
    assert made._room + sum(item.nbytes for item in made._cache.values()) == made._cache_bytes
