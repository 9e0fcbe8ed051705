"""Reading a model folder: which files, which dtype, how much memory, and every way in which it can be wrong."""

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_gguf as tiny
import torch
from safetensors.torch import save_file

from minivllm.models.hub import resolve_model
from minivllm.models.loading import CheckpointError, LoadedModel, dummy_tensors, find_tensors, load_model, read_header

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 7,
}


def write_config(folder: Path, **changes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_config(tmp_path / "model")


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(dtype)
        for i, (name, shape) in enumerate(SHAPES)
    }


SHAPES = [("a.weight", (4, 3)), ("b.weight", (5,)), ("c.weight", (2, 2))]


def loaded(folder: Path, dtype: str = "float32") -> dict[str, torch.Tensor]:
    """The weights, copied into tensors of `dtype` as a model does it."""
    targets = {}
    for name, tensor in load_model(folder).weights(dtype):
        targets[name] = torch.empty(tensor.shape, dtype=getattr(torch, dtype)).copy_(tensor)
    return targets


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def write_shards(folder: Path) -> dict[str, torch.Tensor]:
    """Two shards and their index."""
    whole = tensors()
    first = {name: whole[name] for name in ("a.weight", "c.weight")}
    save_file(first, folder / "model-00001-of-00002.safetensors")
    save_file({"b.weight": whole["b.weight"]}, folder / "model-00002-of-00002.safetensors")
    names = {name: f"model-0000{1 if name in first else 2}-of-00002.safetensors" for name in whole}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return whole


# ---- what is read


def test_one_file(folder):
    save_file(tensors(), folder / "model.safetensors")
    assert_equal(loaded(folder), tensors())


def test_shards(folder):
    whole = write_shards(folder)
    assert_equal(loaded(folder), whole)


def test_a_single_file_of_another_name(folder):
    save_file(tensors(), folder / "weights.safetensors")
    assert_equal(loaded(folder), tensors())


def test_files_beside_the_checkpoint_are_left_alone(folder):
    save_file(tensors(), folder / "model.safetensors")
    save_file({"other": torch.zeros(1)}, folder / "consolidated.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    assert_equal(loaded(folder), tensors())


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16"])
def test_weights_are_cast_on_the_way(folder, stored, wanted):
    save_file(tensors(stored), folder / "model.safetensors")
    expected = {name: tensor.to(getattr(torch, wanted)) for name, tensor in tensors(stored).items()}
    assert_equal(loaded(folder, wanted), expected)


def test_torch_gets_its_threads_back(folder):
    save_file(tensors(), folder / "model.safetensors")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        weights = load_model(folder).weights("float32")
        next(weights)
        assert torch.get_num_threads() == 1
        weights.close()  # given up half way, as after an error
        assert torch.get_num_threads() == 3
        loaded(folder)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_an_unknown_dtype(folder):
    with pytest.raises(ValueError, match="dtype must be one of .*; got 'int8'"):
        load_model(folder, load_format="dummy").weights("int8")


def test_headers_tell_names_shapes_and_dtypes(folder):
    save_file(tensors(torch.bfloat16), folder / "model.safetensors")
    records = {record.name: record for record in read_header(folder / "model.safetensors")}
    assert {name: record.shape for name, record in records.items()} == dict(SHAPES)
    assert {record.dtype for record in records.values()} == {"BF16"}


# ---- what is refused


def test_pickled_weights(folder):
    torch.save(tensors(), folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: pickle files"):
        load_model(folder)


def test_no_weights(folder):
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        load_model(folder)


def test_several_files_without_an_index(folder):
    for name in ("x", "y"):
        save_file(tensors(), folder / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"no model\.safetensors\.index\.json"):
        load_model(folder)


def test_a_missing_shard(folder):
    write_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="names the file model-00002-of-00002.safetensors, which is not there"):
        load_model(folder)


def test_an_index_that_lies(folder):
    write_shards(folder)
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())
    names["weight_map"]["ghost.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(names))
    with pytest.raises(CheckpointError, match=r"says that ghost\.weight is in model-00001"):
        load_model(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd"])
def test_an_index_that_points_outside_the_folder(folder, name):
    save_file(tensors(), folder.parent / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": name}}))
    with pytest.raises(CheckpointError, match="outside"):
        load_model(folder)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        load_model(folder)


def test_a_damaged_file(folder):
    save_file(tensors(), folder / "good")
    good = (folder / "good").read_bytes()
    bad = {
        "empty": b"",
        "cut in the header": good[:40],
        "cut in the data": good[:-1],
        "too long": good + b"x",
        "not safetensors": b"\xff" * 400,
        "a list": (2).to_bytes(8, "little") + b"[]",
        "no offsets": (17).to_bytes(8, "little") + b'{"a":{"shape":1}}',
    }
    for data in bad.values():
        (folder / "model.safetensors").write_bytes(data)
        with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole safetensors file"):
            find_tensors(folder)


def test_any_damage_to_a_header_names_the_file(folder):
    """Bytes of the header are replaced at random: the file loads as before, or an error names it."""
    save_file(tensors(), folder / "model.safetensors")
    good, rng, named = (folder / "model.safetensors").read_bytes(), random.Random(0), 0
    length = 8 + int.from_bytes(good[:8], "little")
    for _ in range(300):
        broken = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            broken[rng.randrange(length)] = rng.choice(b'{}[]",:0123456789xF\x00\xff')
        (folder / "model.safetensors").write_bytes(broken)
        try:
            loaded(folder)
        except CheckpointError as error:
            named += "model.safetensors" in str(error)
            assert "model.safetensors" in str(error)
    assert named > 200


def test_a_tensor_of_integers_is_named(folder):
    save_file(tensors() | {"q.weight": torch.zeros(3, dtype=torch.int8)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor q\.weight has dtype I8"):
        loaded(folder)


def test_a_value_beyond_float16_is_named(folder):
    save_file(tensors() | {"big.weight": torch.tensor([1e5])}, folder / "model.safetensors")
    assert loaded(folder, "bfloat16")["big.weight"].isfinite().all()
    with pytest.raises(CheckpointError, match=r"tensor big\.weight \(F32\) has values beyond float16"):
        loaded(folder, "float16")


@pytest.mark.parametrize(("text", "said"), [("{", "cannot read"), ("[]", "must hold a JSON object")])
def test_a_broken_config(folder, text, said):
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"{said}|config\.json {said}"):
        load_model(folder)


def test_dummy_weights_of_a_quantized_model(folder):
    write_config(folder, quantization_config={"quant_method": "gptq"})
    with pytest.raises(CheckpointError, match="dummy weights of a quantized model are not implemented"):
        load_model(folder, load_format="dummy")


def test_load_formats(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    save_file(tensors(), folder / "model.safetensors")
    with pytest.raises(ValueError, match="load_format must be one of auto, safetensors, gguf, dummy; got 'pt'"):
        load_model(folder, load_format="pt")
    with pytest.raises(CheckpointError, match="was not made from a GGUF file"):
        load_model(folder, load_format="gguf")
    gguf = tiny.write_gguf(tmp_path / "tiny.gguf")
    assert load_model(gguf, load_format="gguf").path == resolve_model(gguf)


# ---- dummy weights


def dummy(folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    return dict(load_model(folder, load_format="dummy", seed=seed).weights("float32"))


def test_dummy_weights_have_the_shapes_of_the_model_and_follow_the_seed(folder):
    first, again, other = dummy(folder), dummy(folder), dummy(folder, seed=1)
    assert {name: tuple(t.shape) for name, t in first.items()} == load_model(
        folder, load_format="dummy"
    ).spec.weight_shapes()
    assert_equal(again, first)
    name = "model.layers.1.mlp.up_proj.weight"
    assert not torch.equal(other[name], first[name])
    assert not torch.equal(first[name], first["model.layers.0.mlp.up_proj.weight"])
    assert torch.equal(first["model.norm.weight"], torch.ones(16))


def test_dummy_weights_do_not_depend_on_what_else_is_drawn():
    whole = dict(dummy_tensors({"a": (100, 100), "b": (100, 100)}, 3))
    alone = dict(dummy_tensors({"b": (100, 100)}, 3))
    assert torch.equal(whole["b"], alone["b"])
    assert whole["a"].std().item() == pytest.approx(0.02, rel=0.05)
    assert whole["a"].mean().item() == pytest.approx(0.0, abs=0.001)


# ---- what is known of a model


def test_facts(folder):
    facts = load_model(folder, load_format="dummy").facts(block_size=8, dtype="bfloat16")
    layer = 16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24 + 2 * 16
    assert facts.weight_bytes == 2 * (40 * 16 + 16 + 2 * layer)
    assert (facts.vocab_size, facts.num_layers, facts.max_position_embeddings) == (40, 2, 64)
    assert [(s.kind, s.block_size, s.num_kv_heads, s.head_dim, s.dtype_bytes) for s in facts.kv_specs] == [
        ("full", 8, 1, 8, 2)
    ] * 2
    assert facts.path == str(folder)


@pytest.mark.parametrize(
    ("changes", "stored", "expected"),
    [
        ({}, torch.bfloat16, "bfloat16"),
        ({"dtype": "float16"}, torch.bfloat16, "float16"),
        ({"torch_dtype": "bfloat16"}, torch.float32, "bfloat16"),
    ],
)
def test_checkpoint_dtype(folder, changes, stored, expected):
    write_config(folder, **changes)
    save_file(tensors(stored), folder / "model.safetensors")
    assert load_model(folder).checkpoint_dtype == expected


@pytest.mark.parametrize(
    ("generation", "expected"),
    [(None, (7,)), ({"eos_token_id": [1, 2]}, (1, 2)), ({"eos_token_id": 3}, (3,)), ({}, (7,))],
)
def test_eos_token_ids(folder, generation, expected):
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert load_model(folder, load_format="dummy").eos_token_ids == expected


def test_overrides_replace_entries_of_the_config(folder):
    model = load_model(folder, load_format="dummy", hf_overrides={"max_position_embeddings": 32})
    assert model.facts(16, "float32").max_position_embeddings == 32


WITHOUT_TORCH = """
import sys
from minivllm.models.loading import load_model
model = load_model(sys.argv[1])
assert len(model.records) == 3 and model.checkpoint_dtype == "float32"
assert not {"torch", "transformers", "safetensors", "gguf"} & set(sys.modules)
"""


def test_nothing_heavy_is_imported_before_weights_are_read(folder):
    save_file(tensors(), folder / "model.safetensors")
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, str(folder)], check=True)


PEAK = """
import sys, torch
from minivllm.models.loading import load_model
def private():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024
model = load_model(sys.argv[1])
target = torch.empty(1024, 1024, dtype=getattr(torch, sys.argv[2]))
target.copy_(torch.ones(1024, 1024))
before, peak = private(), 0.0
for name, tensor in model.weights(sys.argv[2]):
    target.copy_(tensor)
    assert float(target.sum()) == tensor.numel()
    peak = max(peak, private() - before)
print(peak)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_stays_at_one_tensor(folder, dtype):
    """24 tensors of 4 MB: private memory may grow by one or two, not by all."""
    save_file({f"t{i}": torch.ones(1024, 1024) for i in range(24)}, folder / "model.safetensors")
    done = subprocess.run([sys.executable, "-c", PEAK, str(folder), dtype], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 16


# ---- the real model


def test_smollm2_facts(smollm2_path):
    model = load_model("smollm2")
    assert isinstance(model, LoadedModel)
    facts = model.facts(16, "bfloat16")
    assert facts.path == str(smollm2_path)
    assert facts.weight_bytes == 2 * 134_515_008
    assert (facts.num_layers, facts.vocab_size, facts.max_position_embeddings) == (30, 49152, 8192)
    assert model.eos_token_ids == (2,)
    shapes = model.spec.weight_shapes()
    assert {record.name: record.shape for record in model.records} == shapes
    assert sum(math.prod(shape) for shape in shapes.values()) == 134_515_008


@pytest.mark.parametrize("value", ["7", [1, "7"], 40, -1, 7.0, True, {"id": 7}])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_token_that_is_none_is_the_files_fault(folder, file, value):
    if file == "config.json":
        write_config(folder, eos_token_id=value)
    else:
        (folder / file).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=rf"{file}: eos_token_id must be a token id below vocab_size, 40"):
        load_model(folder, load_format="dummy")


def test_the_end_tokens_of_the_config_are_those_of_generation(folder):
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    assert load_model(folder, load_format="dummy").generation_config == {"temperature": 0.5, "eos_token_id": 7}


@pytest.mark.parametrize("own", [True, False])
def test_an_output_layer_of_its_own_is_used_whatever_the_config_says(folder, own):
    spec = load_model(folder, load_format="dummy").spec
    head = torch.randn(40, 16)
    save_file(
        {spec.names.embedding: torch.ones(40, 16) if own else head, spec.names.head: head.clone()},
        folder / "model.safetensors",
    )
    assert load_model(folder).spec.tie_word_embeddings is not own
