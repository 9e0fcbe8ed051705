"""Tokenizers are transformers' own; chat templates that cannot work are refused."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_gguf as tiny
from transformers import AutoTokenizer

from minivllm.models.gguf import convert_gguf
from minivllm.models.tokenizer import apply_chat_template, get_tokenizer, packages_distributions

TEXTS = ("a  12", "the ab <think> 🙂", "<|im_start|>user\nthe<|im_end|>", "", " \n\t", "नमस्ते e\u0301")
USER = [{"role": "user", "content": "the ab"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    convert_gguf(tiny.write_gguf(path / "m.gguf"), path / "hf")
    return path / "hf"


@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "GPT2Tokenizer", None])
def test_the_tokenizer_is_transformers_own(folder, tmp_path, tokenizer_class):
    """By the short way (a class that adds nothing) and by the long one."""
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": tokenizer_class}))
    ours, theirs = get_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert type(ours) is type(theirs)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template
    assert ours.model_max_length == theirs.model_max_length
    assert ours.clean_up_tokenization_spaces == theirs.clean_up_tokenization_spaces


def test_a_tokenizer_from_a_gguf_file(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path))
    tokenizer = get_tokenizer(tiny.write_gguf(tmp_path / "tiny.gguf"))
    assert tokenizer.tokenize("a12") == ["a", "1", "2"]


def test_a_converted_folder_needs_no_auto_classes(folder):
    code = "import sys; from minivllm.models.tokenizer import get_tokenizer; get_tokenizer(sys.argv[1])"
    code += "; assert not {'torch', 'transformers.models.auto.tokenization_auto'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


def test_packages_are_found_as_by_importlib():
    """It stands for importlib's function while transformers is imported, so that this takes half as long."""
    ours, usual = packages_distributions(), importlib.metadata.packages_distributions()
    assert len(usual) > 50
    assert {name: set(ours.get(name, ())) for name in usual} == {name: set(found) for name, found in usual.items()}


def test_the_import_of_transformers_gets_ours(tmp_path):
    """And importlib is left as it was."""
    body = "import importlib.metadata\nGIVEN = importlib.metadata.packages_distributions.__module__\n"
    (tmp_path / "transformers.py").write_text(body)
    code = f"""
import importlib.metadata, sys
from minivllm.models.tokenizer import _import_transformers
sys.path.insert(0, {str(tmp_path)!r})
usual = importlib.metadata.packages_distributions
assert _import_transformers().GIVEN == "minivllm.models.tokenizer"
assert importlib.metadata.packages_distributions is usual
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_module_loads_no_transformers():
    code = "import sys, minivllm.models.tokenizer; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_folder_without_a_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no tokenizer"):
        get_tokenizer(tmp_path)


def test_a_broken_tokenizer_file(folder, tmp_path):
    (tmp_path / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=f"cannot load a tokenizer from {tmp_path}"):
        get_tokenizer(tmp_path)


def test_a_tokenizer_on_the_hub_without_the_hub(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="cannot load a tokenizer from org/model"):
        get_tokenizer("org/model", download_dir=tmp_path)


def test_code_from_the_model_is_not_run(folder, tmp_path):
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    remote = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(remote))
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ValueError, match="cannot load a tokenizer|trust_remote_code"):
        get_tokenizer(tmp_path)


# ---- chat


def test_chat_is_what_transformers_renders_and_encodes(folder):
    tokenizer, oracle = get_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    talk = [*USER, {"role": "assistant", "content": "a"}, *USER]
    for options in (
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ):
        text, ids = apply_chat_template(tokenizer, talk, **options)
        options = {"add_generation_prompt": True} | options
        assert text == oracle.apply_chat_template(talk, tokenize=False, **options)
        assert ids == oracle.apply_chat_template(talk, return_dict=False, **options)
    assert text.endswith("user\nthe ab")


def test_bos_is_not_added_twice(tmp_path):
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    options = {"tokenizer__ggml__add_bos_token": True, "tokenizer__chat_template": template}
    convert_gguf(tiny.write_gguf(tmp_path / "m.gguf", **options), tmp_path / "hf")
    tokenizer = get_tokenizer(tmp_path / "hf")
    assert tokenizer.encode("a")[0] == 1
    assert apply_chat_template(tokenizer, [{"role": "user", "content": "a"}])[1] == tokenizer.encode("a")


def test_another_template_and_its_variables(folder):
    template = "{% if loud %}LOUD {% endif %}{{ messages[0]['content'] }}"
    tokenizer = get_tokenizer(folder)
    assert apply_chat_template(tokenizer, USER, chat_template=template)[0] == "the ab"
    assert apply_chat_template(tokenizer, USER, chat_template=template, loud=True)[0] == "LOUD the ab"


@pytest.mark.parametrize("options", [{"tools": [{"type": "function"}]}, {"enable_thinking": False}])
def test_what_the_template_would_ignore_is_refused(folder, options):
    with pytest.raises(ValueError, match=f"has no use for {next(iter(options))!r}"):
        apply_chat_template(get_tokenizer(folder), USER, **options)


def test_a_model_without_a_template(tmp_path):
    convert_gguf(tiny.write_gguf(tmp_path / "m.gguf", tokenizer__chat_template=None), tmp_path / "hf")
    tokenizer = get_tokenizer(tmp_path / "hf")
    with pytest.raises(ValueError, match="has no chat template"):
        apply_chat_template(tokenizer, USER)
    assert apply_chat_template(tokenizer, USER, chat_template="{{ messages[0].role }}")[0] == "user"


@pytest.mark.parametrize(
    ("messages", "error", "said"),
    [
        ([], ValueError, "at least one message"),
        ("hello", TypeError, "a list of messages, got str"),
        (["hello"], TypeError, "message 0 must be a dict"),
        ([*USER, {"content": "x"}], TypeError, "message 1 must be a dict with a role"),
        ([{"role": "user"}], ValueError, "refuses these messages"),
        ([{"role": "user", "content": None}], ValueError, "refuses these messages"),
        ([{"role": "user", "content": ["part"]}], ValueError, "message 0: this model reads text alone, .* got .part."),
    ],
)
def test_malformed_messages(folder, messages, error, said):
    with pytest.raises(error, match=said):
        apply_chat_template(get_tokenizer(folder), messages)


def test_a_template_that_raises(folder):
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="roles must alternate"):
        apply_chat_template(get_tokenizer(folder), USER, chat_template=template)
    with pytest.raises(ValueError, match="refuses"):
        apply_chat_template(get_tokenizer(folder), USER, chat_template="{% if %}")


def test_contradicting_options(folder):
    with pytest.raises(ValueError, match="exclude each other"):
        apply_chat_template(get_tokenizer(folder), USER, continue_final_message=True)


def test_the_real_template(smollm2_path):
    text, ids = apply_chat_template(get_tokenizer("smollm2"), [{"role": "user", "content": "hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert ids[-9:] == [4093, 198, 6004, 2, 198, 1, 520, 9531, 198]
    assert get_tokenizer("smollm2").decode(ids) == text
