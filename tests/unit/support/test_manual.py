"""How the commands of the manual are read, and their output compared: tests/support/manual.py."""

from __future__ import annotations

from tests.support.manual import ROOT, Block, Command, with_jobs

EPOCH = "epoch 7 loss 0.1"


def block(text: str, words: str = "", language: str = "console") -> Block:
    return Block(ROOT / "README.md", 1, language, words, text)


def test_how_a_block_is_read() -> None:
    one, two = block("$ cat <<E\n> x\n> E\nx\n$ false\nodd\n", "rc=1").commands
    assert (one.text, one.prints, one.exit_code) == ("cat <<E\nx\nE", ("x",), 0)
    assert (two.text, two.prints, two.exit_code) == ("false", ("odd",), 1)
    assert block("true\n", language="sh").commands[0].text == "set -e\ntrue\n"
    assert block("$ x\n", "no-run: needs a GPU").shown_only == "needs a GPU"
    assert not block("$ x\n", "no-run: needs a GPU").runs
    assert not block("$ x\n", "no-run:").shown_only
    assert block("a: 1\n", "a.yaml", "yaml").file == "a.yaml"


def test_what_is_printed_must_agree_in_shape_and_order() -> None:
    command = Command("here", "x", ("epoch  1  loss 0.5", "...", "done, job 12"))
    assert command.differs("noise\nepoch 7 loss 0.1\nepoch 8 loss 0.1\ndone, job 3\n") == ""
    assert command.differs("done, job 3\nepoch 7 loss 0.1\n") == "done, job 12"
    assert command.differs(f"{EPOCH}\ndone, job three\n") == command.prints[-1]
    assert command.jobs(f"{EPOCH}\ndone, job 3\n") == {"12": "3"}
    cut = Command("here", "x", ("made 7 things, ...",))
    assert (cut.differs("made 9 things, a and b"), cut.differs("made 9 nodes")) == (
        "",
        "made 7 things, ...",
    )
    assert Command("here", "x", ("in /home/ada: done",)).differs("in /home/kim-2: done") == ""
    figures = Command("here", "x", ("job 3: loss 0.103 after 46 steps",), figures=True)
    assert figures.differs("job 7: loss 0.106 after 46 steps") == ""
    for said in ("job 3: loss 0.26 after 46 steps", "job 3: loss 0.103 after 47 steps"):
        assert figures.differs(said)
    assert Command("here", "x", ("in /home/ada: done",)).differs("in /home/: done")
    text = with_jobs("logs 12 -f; cancel 12_3; sleep 0.12; submit --nodes 12", {"12": "3"})
    assert text == "logs 3 -f; cancel 3_3; sleep 0.12; submit --nodes 12"
