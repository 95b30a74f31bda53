"""Generated text, held against `transformers`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from families import FAMILIES, family
from helpers import run_worlds
from simulated import engines, pieces_of
from tiny import tiny_model, tiny_plan

from phalanx.checkpoint.parts import publish, write_part
from phalanx.checkpoint.weights import open_weights
from phalanx.cli.main import main
from phalanx.data.tokenizer import train_tokenizer
from phalanx.errors import InputError
from phalanx.plan.layout import Layout
from phalanx.spec.job import DataSpec
from phalanx.trainer.generate import Generator, greedy, sampler
from phalanx.trainer.recorder import Recorder
from phalanx.trainer.world import World

PROMPT = [7, 77, 177, 42, 5]
CPU = torch.device("cpu")


def clear_continuation(model) -> tuple[list[int], list[int]]:
    """A prompt, and what transformers adds to it: one where no choice hangs on rounding."""
    for seed in range(10):
        prompt = torch.randint(0, 250, (1, 5), generator=torch.Generator().manual_seed(seed))
        mask, how = torch.ones_like(prompt), {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 30}
        found = model.generate(prompt, attention_mask=mask, return_dict_in_generate=True, output_scores=True, **how)
        best = torch.cat(found.scores).topk(2).values
        if (best[:, 0] - best[:, 1]).min() > 1e-4:
            return prompt[0].tolist(), found.sequences[0, 5:].tolist()
    raise AssertionError("every prompt meets a tie")


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_greedy_tokens_equal_transformers(name, tmp_path):
    model = family(name)
    model.save_pretrained(tmp_path / "theirs")
    generator = Generator(open_weights(tmp_path / "theirs"))
    tokens = torch.arange(60) * 37 % 250
    with torch.no_grad():
        truth = model(tokens.unsqueeze(0)).logits[0]
    generator.clear(60)
    assert torch.allclose(generator.logits(generator.forward(tokens)), truth, rtol=0, atol=1e-5)
    generator.clear(60)  # with a prompt, then token by token
    steps = [generator.forward(tokens[:20]), *(generator.forward(tokens[i : i + 1]) for i in range(20, 60))]
    assert torch.allclose(generator.logits(torch.cat(steps)), truth, rtol=0, atol=1e-5)

    prompt, theirs = clear_continuation(model)
    assert list(generator.generate(prompt, 30, greedy, stop=[3])) == [token for token in theirs if token != 3]


def test_generation_ends_where_the_text_or_the_model_does(tmp_path):
    family("gpt2").save_pretrained(tmp_path / "theirs")
    generator = Generator(open_weights(tmp_path / "theirs"))
    every = list(generator.generate(PROMPT, 1000, greedy))
    assert len(every) == 64 - len(PROMPT)
    assert list(generator.generate(PROMPT, 3, greedy)) == every[:3]
    known = every.index(every[5])
    assert list(generator.generate(PROMPT, 1000, greedy, stop={every[5]})) == every[:known]
    for prompt, wrong in ([], "0 tokens"), ([1] * 64, "64 tokens"), ([1, 250], "id 250"):
        with pytest.raises(InputError, match=wrong):
            list(generator.generate(prompt, 3, greedy))


def continued(world: World, folder: Path) -> tuple[torch.Tensor, list[int], list[int]]:
    """Logits of a prompt read at once and then token by token, greedy tokens, and drawn ones."""
    generator = Generator(open_weights(folder), world.layout, world.coord, world.comm)
    tokens = torch.arange(30) * 37 % 250
    generator.clear(30)
    rows = torch.cat([generator.forward(tokens[:28]), *(generator.forward(tokens[i : i + 1]) for i in (28, 29))])
    drawn = generator.generate(PROMPT, 20, sampler(1.0, 0, 0.9, 7))
    return generator.logits(rows), list(generator.generate(PROMPT, 20, greedy)), list(drawn)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama 3.1", Layout(tensor=4)),  # kv heads are copied
        ("llama tied", Layout(pipeline=3)),  # uneven; the last stage has a copy of the embedding
        ("gpt2", Layout(tensor=2, pipeline=2)),
    ],
)
def test_any_layout_generates_what_one_process_does(name, layout, tmp_path):
    family(name).save_pretrained(tmp_path)
    weights = open_weights(tmp_path)
    alone = continued(World(rank=0, layout=Layout(), device=CPU, recorder=Recorder(), comms={}), tmp_path)
    for logits, greedy_tokens, drawn in run_worlds(layout, continued, tmp_path, model=weights.model):
        assert torch.allclose(logits, alone[0], rtol=0, atol=1e-5)
        assert (greedy_tokens, drawn) == alone[1:]


def test_draws_follow_the_probabilities():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = probabilities.log() + 3

    def frequencies(temperature: float, top_k: int, top_p: float = 1.0) -> torch.Tensor:
        choose = sampler(temperature, top_k, top_p, 1)
        return torch.bincount(torch.tensor([choose(logits) for _ in range(2000)]), minlength=4) / 2000

    assert torch.allclose(frequencies(1.0, 0), probabilities, atol=0.04)
    sharper = probabilities.square()
    assert torch.allclose(frequencies(0.5, 0), sharper / sharper.sum(), atol=0.04)
    two = torch.tensor([0.625, 0.375, 0.0, 0.0])
    assert torch.allclose(frequencies(1.0, 2), two, atol=0.04)
    assert torch.allclose(frequencies(1.0, 0, 0.75), two, atol=0.04)  # 0.5 is too little, 0.8 enough
    assert torch.allclose(frequencies(1.0, 2, 0.6), torch.tensor([1.0, 0.0, 0.0, 0.0]))  # of two, the first has 0.625
    first, same, other = (sampler(1.0, 0, 1.0, seed) for seed in (1, 1, 2))
    draws = [[choose(logits) for _ in range(50)] for choose in (first, same, other)]
    assert draws[0] == draws[1] != draws[2]


@pytest.fixture
def run_folder(tmp_path):
    """A run of four ranks that has a checkpoint, and data with a tokenizer."""
    (tmp_path / "data").mkdir()
    tokenizer = train_tokenizer(["def main():\n    return 'Grüße'\n" * 30], 280, num_bytes=1000)
    tokenizer.save(str(tmp_path / "data" / "tokenizer.json"))
    layout = Layout(tensor=2, data=2, zero=1)
    model = tiny_model(vocab=tokenizer.get_vocab_size(), init_std=0.5)
    plan = tiny_plan(layout, model, precision="fp32", data=DataSpec(path=str(tmp_path / "data" / "tokens")))
    aside = tmp_path / "run" / "checkpoints" / "aside"
    aside.mkdir(parents=True)
    for rank, pieces in enumerate(pieces_of(engines(plan))):
        write_part(aside, rank, 20, pieces)
    publish(aside, aside.with_name("step-000020"), plan, 20, {}, layout.num_ranks)
    return tmp_path / "run"


def test_from_the_command_line(run_folder, capfd):
    out = run_folder.parent / "out"
    assert main(["checkpoint", "export", str(run_folder), "-o", str(out)]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert tokenizer.eos_token == "<|endoftext|>" and model.generation_config.eos_token_id == tokenizer.eos_token_id
    inputs = tokenizer("def main", return_tensors="pt")
    theirs = model.generate(**inputs, max_new_tokens=20, do_sample=False, pad_token_id=0)[0]
    expected = tokenizer.decode(theirs, skip_special_tokens=True) + "\n"
    back = run_folder.parent / "back"
    assert main(["checkpoint", "import", str(out), "-o", str(back)]) == 0
    capfd.readouterr()
    (run_folder / "checkpoints" / "step-000030").mkdir()
    assert main(["checkpoint", "export", str(run_folder), "-o", str(run_folder.parent / "again")]) == 0
    assert "passed over, for it is not whole: step-000030: " in capfd.readouterr().err
    for path in (run_folder, run_folder / "checkpoints" / "step-000020", out, back):
        assert main(["generate", str(path), "def main", "--max-tokens", "20"]) == 0
        assert capfd.readouterr().out == expected
    assert main(["generate", str(out), "def main", "--max-tokens", "20", "--tensor", "2"]) == 0
    assert capfd.readouterr().out == expected
    drawn = ["generate", str(out), "", "--temperature", "2", "--top-k", "50", "--seed", "3"]
    texts = []
    for _ in range(2):
        assert main(drawn) == 0
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] != expected


def test_tokenizers_of_other_forms_are_used_and_carried(tmp_path, capsys):
    """As in published folders of GPT-2 and Llama 2, of which some have no tokenizer.json."""
    family("gpt2").save_pretrained(tmp_path / "theirs")
    trained = train_tokenizer(["a few words of text"], 257, num_bytes=1000)
    trained.model.save(str(tmp_path / "theirs"))  # vocab.json and merges.txt
    assert main(["checkpoint", "import", str(tmp_path / "theirs"), "-o", str(tmp_path / "ours")]) == 0
    assert main(["checkpoint", "export", str(tmp_path / "ours"), "-o", str(tmp_path / "back")]) == 0
    capsys.readouterr()
    outputs = []
    for folder in ("theirs", "ours", "back"):
        assert (tmp_path / folder / "merges.txt").is_file()
        assert not (tmp_path / folder / "tokenizer.json").exists()
        assert main(["generate", str(tmp_path / folder), "z", "--max-tokens", "5"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0].startswith("z") and len(set(outputs)) == 1


def test_wrong_input(run_folder, capsys, tmp_path):
    path = str(run_folder)
    for wrong, said in (
        (["--max-tokens", "0"], "--max-tokens: 0"),
        (["--temperature", "-1"], "--temperature: -1"),
        (["--temperature", "nan"], "--temperature: nan"),
        (["--top-k", "5"], "at temperature 0"),
        (["--top-p", "0.5"], "--top-p: 0.5"),
        (["--top-p", "0", "--temperature", "1"], "--top-p: 0"),
        (["--tensor", "0"], "--tensor: 0"),
        (["--tensor", "3"], "--tensor: tensor 3 does not divide 4 query heads"),
        (["--pipeline", "5"], "--pipeline"),
        (["--tokenizer", path], "holds no tokenizer"),
        (["--tokenizer", __file__], "is not a tokenizer"),
        (["--tokenizer", "byte"], "no such tokenizer"),
        (["--seed", str(2**63)], "--seed: 9223372036854775808"),
    ):
        assert main(["generate", path, "x", *wrong]) == 2
        assert said in capsys.readouterr().err
    assert main(["generate", path, "caf\udce9"]) == 2
    assert r"PROMPT: is not UTF-8 text: '\udce9'" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "data")
    assert main(["generate", path, "x"]) == 2
    assert "there is no tokenizer" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "nothing"), "x"]) == 2
    assert "nothing: there is no such folder" in capsys.readouterr().err
