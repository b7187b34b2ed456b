"""transformers and torchvision beside the payload: training that begins with models of theirs, and
models of ours that they load. Theirs have random weights."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from payload.__main__ import main
from payload.cli.arguments import parse
from payload.comm.base import Solo
from payload.data.datasets import open_dataset, tokenizer_of
from payload.data.gpt2 import load
from payload.data.loader import Order
from payload.device.base import Array, CpuDevice
from payload.models import MODELS
from payload.nn.module import RandomState, Tape
from payload.saved_model.folder import build, read_record, read_weights
from tests.integration.payload.conftest import Runner
from tests.support.doubles.oracle import torch
from tests.support.install import ROOT, run, uv_settings
from tests.support.payload import idx_file, records

if TYPE_CHECKING:
    from torch import nn

pytestmark = pytest.mark.sweep  # PyPI's transformers and torchvision are installed for it

_HF = {
    "gpt-tiny": ("GPT2LMHeadModel", "--layers 2 --heads 2 --width 32"),
    "bert-tiny": ("BertForMaskedLM", "--layers 2 --heads 2 --width 32"),
    "vit-tiny": (
        "ViTForImageClassification",
        "--layers 2 --heads 2 --width 32 --patch 2 --norm-eps 1e-5",
    ),
}
_TEXT = "--data text:{text} --sequence-length 16 --global-batch-size 8"
_LARGE = 65
"""From this side on a ResNet is torchvision's."""
_PAGES = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
_DIGITS = "--global-batch-size 16"


def _libraries() -> Path:
    """A folder of both packages, to use with this environment's PyTorch; made once, in the user's
    cache.
    """
    lock = ROOT / "requirements" / "libraries.lock"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clusterctl-tests"
    folder = cache / hashlib.sha256(lock.read_bytes() + sys.version.encode()).hexdigest()[:16]
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        uv, env, from_index = uv_settings()
        with tempfile.TemporaryDirectory(dir=cache) as unfinished:
            packages = Path(unfinished) / "packages"
            target: list[str | Path] = [
                "--quiet",
                "--no-config",
                "--python",
                sys.executable,
                "--target",
            ]
            wheels = ["--only-binary", ":all:", "--no-deps", "--require-hashes"]
            run(
                [uv, "pip", "install", *target, packages, *from_index, *wheels, "-r", lock], env=env
            )
            with suppress(OSError):  # another worker was quicker
                packages.rename(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def importable_libraries() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_HUB_OFFLINE", "1")
        patched.setattr(sys, "path", [*sys.path, str(_libraries())])
        _define_operators()
        yield


@cache
def _define_operators() -> None:
    """PyPI's torchvision has operators for CUDA, which PyTorch for CPUs can't load. Models need
    none.

    Once a process: a worker may come back to this module.
    """
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")


def _random(module: nn.Module) -> nn.Module:
    """All its numbers drawn, so that a bias or a table that is left out makes a difference."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.is_floating_point():
                low, high = (0.5, 1.5) if name.endswith("running_var") else (-0.2, 0.2)
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * (high - low) + low)
    return module.eval()


def _made(model: str) -> nn.Module:
    """A model of transformers with the sizes of ours here."""
    import transformers as hf  # noqa: PLC0415

    shared = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 32,
        "intermediate_size": 128,
    }
    configs: dict[str, Any] = {
        "gpt-tiny": lambda: hf.GPT2Config(
            n_layer=2,
            n_head=2,
            n_embd=32,
            vocab_size=256,
            n_positions=40,
            bos_token_id=None,
            eos_token_id=None,
        ),
        "bert-tiny": lambda: hf.BertConfig(**shared, vocab_size=257, max_position_embeddings=16),
        "vit-tiny": lambda: hf.ViTConfig(
            **shared, image_size=8, patch_size=2, num_channels=1, num_labels=10, layer_norm_eps=1e-5
        ),
    }
    torch.manual_seed(0)
    return _random(getattr(hf, _HF[model][0])(configs[model]()))


def _flags(model: str, folder: Path) -> str:
    (folder / "text").write_bytes(b"the quick brown fox jumps over the lazy dog, " * 60)
    data = (_DIGITS if MODELS[model].takes == "images" else _TEXT).format(text=folder / "text")
    return f"--model {model} {_HF[model][1]} --dropout 0 {data}"


def _train(alone: Runner, flags: str, out: Path) -> float:
    """One iteration; its loss, which is before the update."""
    alone("train", *flags.split(), "--iterations", "1", "--device", "cpu", "--out", str(out))
    return float(records(out, "iteration")[0]["loss"])


def _first_batch(flags: str) -> tuple[Array, Array]:
    config = parse(["train", *flags.split()])
    dataset = open_dataset(config, Solo())
    size = config.batch.global_batch_size
    slot = Order(dataset.training, size, seed=0).at(1)
    return dataset.training_batch(
        slot.indices, 1, RandomState(0, 1, np.arange(size, dtype="uint32"))
    )


def _logits(module: nn.Module, x: Array) -> torch.Tensor:
    given = torch.tensor(x)
    with torch.no_grad():
        answer = module(given.permute(0, 3, 1, 2)) if given.is_floating_point() else module(given)
    return answer if isinstance(answer, torch.Tensor) else answer.logits


def _ours(folder: Path, x: Array) -> Array:
    record = read_record(folder)
    y: Array = x.copy()
    for unit in build(record, read_weights(folder, "final", record), CpuDevice()):
        y = unit.layer.forward(y, Tape(training=False))
    return y


@pytest.mark.parametrize("model", _HF)
def test_transformers_model_is_imported_and_exported(
    alone: Runner, model: str, tmp_path: Path
) -> None:
    module = _made(model)
    flags = _flags(model, tmp_path)
    module.save_pretrained(tmp_path / "theirs")
    loss = _train(alone, f"{flags} --lr 1e-9 --init {tmp_path / 'theirs'}", tmp_path / "run")
    x, targets = _first_batch(flags)
    expected = torch.nn.functional.cross_entropy(
        _logits(module, x).flatten(0, -2), torch.tensor(targets).flatten(), ignore_index=-1
    )
    assert loss == pytest.approx(expected.item(), rel=1e-5)

    folder = tmp_path / "run" / "model"
    back = tmp_path / "back"
    assert (
        main(["export", "--model-folder", str(folder), "--to", str(back), "--export-as", "hf"]) == 0
    )
    again, found = type(module).from_pretrained(back, output_loading_info=True)
    assert not any(found.values()), found
    assert again.config.to_dict().keys() == module.config.to_dict().keys()
    logits = _logits(again.eval(), x).numpy()
    np.testing.assert_allclose(
        _ours(folder, x)[..., : logits.shape[-1]], logits, rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(logits, _logits(module, x).numpy(), rtol=1e-4, atol=1e-5)
    if model != "vit-tiny":  # whose modules have other names since transformers 5 than its files
        from safetensors.torch import load_file  # noqa: PLC0415

        again.load_state_dict(load_file(back / "model.safetensors"), strict=True)


def _resnet(model: str, side: int) -> nn.Module:
    """torchvision's; for small images with the beginning that docs/payload.md tells of."""
    from torchvision.models import get_model  # noqa: PLC0415

    module = get_model(model, num_classes=10)
    if side < _LARGE:
        module.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
        module.maxpool = torch.nn.Identity()
    return module


@pytest.mark.parametrize(("model", "side"), [("resnet18", 65), ("resnet50", 71), ("resnet18", 33)])
def test_torchvision_resnet_is_imported_and_exported(
    alone: Runner, model: str, side: int, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    _write_images(tmp_path, side)
    module = _random(_resnet(model, side))
    save_file(module.state_dict(), tmp_path / "theirs.safetensors")
    flags = f"--model {model} --data idx:{tmp_path} --global-batch-size 4"
    loss = _train(
        alone, f"{flags} --lr 1e-12 --init {tmp_path / 'theirs.safetensors'}", tmp_path / "run"
    )
    x, targets = _first_batch(flags)
    trained = _logits(module.train(), x)  # by the statistics of the batch
    expected = torch.nn.functional.cross_entropy(trained, torch.tensor(targets))
    assert loss == pytest.approx(expected.item(), rel=1e-4)

    folder = tmp_path / "run" / "model"
    file = tmp_path / "back.safetensors"
    argv = [
        "export",
        "--model-folder",
        str(folder),
        "--to",
        str(file),
        "--weights",
        "final",
        "--export-as",
    ]
    if side < _LARGE:
        assert main([*argv, "torchvision"]) == 2
        assert not file.exists()
    assert main([*argv, "torch" if side < _LARGE else "torchvision"]) == 0
    again = _resnet(model, side)
    again.load_state_dict(load_file(file), strict=True)
    logits = _logits(again.eval(), x).numpy()
    scale = np.abs(logits).max()
    np.testing.assert_allclose(_ours(folder, x) / scale, logits / scale, rtol=1e-4, atol=1e-5)


def _write_images(folder: Path, side: int) -> None:
    rng = np.random.default_rng(5)
    for kind, count in (("train", 4), ("t10k", 2)):
        images = rng.integers(0, 256, (count, side, side, 3), dtype="uint8")
        (folder / f"{kind}-images-idx3-ubyte").write_bytes(idx_file(images))
        labels = np.resize(np.array([9, 3, 5, 0], "uint8"), count)
        (folder / f"{kind}-labels-idx1-ubyte").write_bytes(idx_file(labels))


def test_exported_preprocessing_equals_that_of_the_payload(alone: Runner, tmp_path: Path) -> None:
    from transformers import ViTForImageClassification, ViTImageProcessor  # noqa: PLC0415

    _write_images(tmp_path, 8)
    flags = f"--model vit-tiny {_HF['vit-tiny'][1]} --data idx:{tmp_path} --global-batch-size 4"
    _train(alone, flags, tmp_path / "run")
    folder = tmp_path / "run" / "model"
    back = tmp_path / "back"
    assert (
        main(["export", "--model-folder", str(folder), "--to", str(back), "--export-as", "hf"]) == 0
    )
    pixels = bytearray((tmp_path / "train-images-idx3-ubyte").read_bytes()[20:])
    images = np.frombuffer(pixels, "uint8").reshape(4, 8, 8, 3)
    given = ViTImageProcessor.from_pretrained(back)(list(images), return_tensors="pt")
    with torch.no_grad():
        logits = ViTForImageClassification.from_pretrained(back)(**given).logits.numpy()
    known = read_record(folder).input
    x = ((images - np.array(known["mean"])) * np.array(known["scale"])).astype("float32")
    np.testing.assert_allclose(_ours(folder, x), logits, rtol=1e-4, atol=1e-5)


def _texts() -> list[str]:
    """Pages, and strings with blanks, newlines, contractions and characters of all kinds."""
    rng = random.Random(3)  # noqa: S311
    all_ = [chr(code) for code in range(0x3000)]
    odd = [
        *" \t\n'stremvld0a_-",
        *map(chr, (0xA0, 0x2003, 0x200B, 0x1C, 0x85, 0x3000)),
        *"é中½²Ⅷ٣😀",
    ]
    drawn = ["".join(rng.choices(rng.choice((odd, all_)), k=30)) for _ in range(2000)]
    return [
        *_PAGES,
        *drawn,
        "a<|endoftext|>b <|endoftext|> <|endoftext|>'s",
        "  two  ",
        "\n\n\tx\n",
        "",
    ]


def _learned_by_theirs(folder: Path) -> str:
    """A value of --tokenizer: tokens that the library of transformers learned, in GPT-2's files."""
    from tokenizers import ByteLevelBPETokenizer  # noqa: PLC0415

    made = ByteLevelBPETokenizer()
    made.train_from_iterator(
        _PAGES, vocab_size=2000, special_tokens=["<|endoftext|>"], show_progress=False
    )
    made.save_model(str(folder))
    return f"gpt2:{folder}"


def test_gpt_2s_tokens_are_transformers(tmp_path: Path) -> None:
    from transformers import GPT2TokenizerFast  # noqa: PLC0415

    _learned_by_theirs(tmp_path)
    own_tokenizer = load(tmp_path)
    hf = GPT2TokenizerFast.from_pretrained(tmp_path)
    for text in _texts():
        tokens = own_tokenizer.encode(text.encode())
        assert tokens.tolist() == hf(text)["input_ids"], text
        assert own_tokenizer.decode(tokens) == text.encode()


@pytest.mark.parametrize("tokens", ["bytes", "bpe:600", "gpt2"])
def test_exported_gpt_generates_the_same_text(alone: Runner, tokens: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    (tmp_path / "text").write_text("".join(_PAGES))
    kind = _learned_by_theirs(tmp_path) if tokens == "gpt2" else tokens
    flags = (
        f"--model gpt-tiny {_HF['gpt-tiny'][1]} --data text:{tmp_path / 'text'} --tokenizer {kind}"
    )
    training = "--sequence-length 64 --optimizer adamw --lr 0.01 --iterations 60 --device cpu"
    alone("train", *flags.split(), *training.split(), "--out", str(tmp_path / "run"))
    folder = tmp_path / "run" / "model"
    back = tmp_path / "back"
    assert (
        main(["export", "--model-folder", str(folder), "--to", str(back), "--export-as", "hf"]) == 0
    )

    model = AutoModelForCausalLM.from_pretrained(back)
    hf_tokenizer = AutoTokenizer.from_pretrained(back)
    own_tokenizer = tokenizer_of(read_record(folder).tokenizer or {})
    assert hf_tokenizer.model_input_names == ["input_ids", "attention_mask"]
    assert model.config.eos_token_id == hf_tokenizer.eos_token_id
    assert (hf_tokenizer.eos_token_id is None) == (tokens != "gpt2")
    for text in _texts():
        numbers = own_tokenizer.encode(text.encode()).tolist()
        assert hf_tokenizer(text)["input_ids"] == numbers, text
        assert hf_tokenizer.decode(numbers) == text
    given = ("--model-folder", str(folder), *"--temperature 0 --tokens 40 --output json".split())
    for prompt in ("The cluster", " é中😀", "\n\n  a", "it's 12"):
        answer = json.loads(alone("sample", *given, "--prompt", prompt).stdout)
        inputs = hf_tokenizer(prompt, return_tensors="pt")
        written = model.generate(**inputs, do_sample=False, max_new_tokens=40)[
            0, len(inputs["input_ids"][0]) :
        ]
        assert (hf_tokenizer.decode(written), len(written)) == (answer["text"], 40)


@pytest.mark.parametrize("tokens", ["bytes", "bpe:600", "gpt2"])
def test_exported_bert_fills_masks(alone: Runner, tokens: str, tmp_path: Path) -> None:
    """In a text with a mask instead of a token, which for words includes the blank before them."""
    from transformers import AutoModelForMaskedLM, AutoTokenizer, FillMaskPipeline  # noqa: PLC0415

    (tmp_path / "text").write_text("".join(_PAGES))
    kind = _learned_by_theirs(tmp_path) if tokens == "gpt2" else tokens
    flags = (
        f"--model bert-tiny {_HF['bert-tiny'][1]} --data text:{tmp_path / 'text'} --tokenizer "
        f"{kind}"
    )
    training = "--sequence-length 64 --optimizer adamw --lr 0.01 --iterations 30 --device cpu"
    alone("train", *flags.split(), *training.split(), "--out", str(tmp_path / "run"))
    folder = tmp_path / "run" / "model"
    back = tmp_path / "back"
    assert (
        main(["export", "--model-folder", str(folder), "--to", str(back), "--export-as", "hf"]) == 0
    )

    model = AutoModelForMaskedLM.from_pretrained(back)
    hf_tokenizer = AutoTokenizer.from_pretrained(back)
    fill = FillMaskPipeline(model=model, tokenizer=hf_tokenizer)
    record = read_record(folder)
    own_tokenizer = tokenizer_of(record.tokenizer or {})
    mask = record.input["mask"]
    for before, word, after in (("The cluster", " is", " up"), ("a (", "job", ") é中😀 ended")):
        masked = word if tokens != "bytes" else word[-1]
        start = f"{before}{word.removesuffix(masked)}"
        end = after
        blank = " " if masked[0] == " " else ""
        numbers = [*own_tokenizer.encode(start.encode()), mask, *own_tokenizer.encode(end.encode())]
        given = f"{start}{blank}{hf_tokenizer.mask_token}{end}"
        assert hf_tokenizer(given)["input_ids"] == numbers
        logits = _ours(folder, np.array([numbers]))[0, numbers.index(mask)]
        best = int(logits.argmax())
        scores = np.exp(logits - logits.max())
        (found,) = fill(given, top_k=1)
        assert found["token"] == best
        assert found["score"] == pytest.approx(scores[best] / scores.sum(), rel=1e-3)
