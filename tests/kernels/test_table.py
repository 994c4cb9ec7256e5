"""The files of measured tiles: what is believed, what is ignored, and which goes first."""

from __future__ import annotations

import json
import os
import warnings

import pytest
import torch

from moe_patch.kernels import chips, table, tiles
from moe_patch.kernels.tiles import Tile

NAME = "gate_up bfloat16 n768 k2048 m128 r1024"
ARGUMENTS = ("gate_up", 128, 1000, 768, 2048, torch.bfloat16, torch.device("cuda", 0))
GOOD = [128, 64, 64, 4, 3, 16]
W8 = "gate_up_w8", "gate_up"
HEURISTIC = Tile(128, 128, 64, 8, 4)


def content(**changed):
    one = {"format": 1, "card": "A card", "arch": "sm_90", "triton": "3.6.0", "tiles": {NAME: GOOD}}
    return [one | changed]


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The user's file, on a GPU that is not there, with an empty shipped table."""
    monkeypatch.setenv("MOE_PATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(table, "SHIPPED", tmp_path / "shipped.json")
    table.SHIPPED.write_text("[]")
    monkeypatch.setattr(tiles, "INTERPRET", False)
    monkeypatch.setattr(tiles, "has_gluon", lambda: False)
    monkeypatch.setattr(chips, "chip", lambda device: chips.nvidia(90, 232_448))
    monkeypatch.setattr(chips, "name", lambda device: "A card")
    monkeypatch.setattr(tiles.triton, "__version__", "3.6.1")
    tiles.forget()
    (tmp_path / "cache").mkdir()
    yield table.user_file()
    tiles.forget()


def chosen():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return tiles.choose(*ARGUMENTS)


def test_user_before_shipped_before_heuristic(file):
    assert chosen() == HEURISTIC
    table.SHIPPED.write_text(
        json.dumps(content(card="Its sister", tiles={NAME: [128, 32, *GOOD[2:]]}))
    )
    assert chosen() == HEURISTIC, "files are read once"
    tiles.forget()
    assert chosen() == Tile(128, 32, *GOOD[2:])
    table.add(file, "A card", "sm_90", "3.6.0", {NAME: GOOD})
    tiles.forget()
    assert chosen() == Tile(*GOOD)
    with tiles.forced("gate_up", Tile(128, 16, 64, 4, 2)):
        assert chosen() == Tile(128, 16, 64, 4, 2)
    with tiles.forced("gemm", HEURISTIC):
        assert chosen() == Tile(*GOOD)


def test_shipped_tables_go_by_architecture_and_the_same_card_wins(file):
    other = content(card="Another", tiles={NAME: [128, 32, *GOOD[2:]]})
    table.SHIPPED.write_text(json.dumps(content() + other))
    assert chosen() == Tile(*GOOD)
    tiles.forget()
    table.SHIPPED.write_text(json.dumps(content(arch="sm_80")))
    assert chosen() == HEURISTIC


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "no whole JSON file"),
        (json.dumps(content())[:-40], "no whole JSON file"),
        ("\x00\x01", "no whole JSON file"),
        ("[" * 100_000, "no whole JSON file"),
        ("{}", "no list of tables"),
        ("[3]", "its format is '3' and 1 is known"),
        ("[]", "it is of no card and this is A card"),
        (json.dumps(content(format=2)), "its format is '2' and 1 is known"),
        (json.dumps(content(card="L4")), "it is of L4 and this is A card"),
        (json.dumps(content(card=None)), "a table has no card"),
        (json.dumps(content(triton="3.7.0")), "it is of Triton 3.7.0 and this is 3.6.1"),
        (json.dumps(content(tiles=[])), "a table has no tiles"),
        (json.dumps(content(tiles={"gate_up": GOOD})), "the entry 'gate_up' is"),
        *(
            (json.dumps(content(tiles={NAME: tile})), f"the entry '{NAME}' is")
            for tile in (
                None, GOOD[:5], ["128", *GOOD[1:]], [True, *GOOD[1:]], [64, *GOOD[1:]],
                [128, 65, *GOOD[2:]], [128, 512, *GOOD[2:]], [128, 64, 64, 3, 3, 8],
                [128, 64, 64, 4, 0, 8], [128, 64, 64, 4, 3, -1],
            )
        ),
    ],
)  # fmt: skip
def test_a_file_that_is_not_ours_is_ignored_with_one_warning(file, text, words):
    file.write_text(text)
    with pytest.warns(UserWarning) as caught:
        assert tiles.choose(*ARGUMENTS) == HEURISTIC
    assert len(caught) == 1
    said = str(caught[0].message)
    assert str(file) in said and words in said and "`python -m moe_patch tune`" in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiles.choose(*ARGUMENTS[:2], 3, *ARGUMENTS[3:])
    table.add(file, "A card", "sm_90", "3.6.0", {NAME: GOOD})
    tiles.forget()
    assert chosen() == Tile(*GOOD)


def test_a_file_that_cannot_be_read_is_ignored_with_a_warning(file):
    file.mkdir()
    with pytest.warns(UserWarning, match="are ignored, because"):
        assert tiles.choose(*ARGUMENTS) == HEURISTIC


def test_an_entry_fits_the_shared_memory_and_n(file, monkeypatch):
    table.add(file, "A card", "sm_90", "3.6.0", {NAME: [128, 128, 128, 8, 8, 8]})
    assert chosen() == Tile(128, 128, 128, 8, 2)
    monkeypatch.setattr(chips, "chip", lambda device: chips.nvidia(90, 66_000))
    tiles.forget()
    assert chosen() == tiles.heuristic(tiles.Product(*ARGUMENTS)), "not one stage fits"
    name = table.key("gemm", "float16", 40, 64, 16, 1)
    table.add(file, "A card", "sm_90", "3.6.0", {name: [16, 256, 64, 4, 2, 8]})
    tiles.forget()
    found = tiles.choose("gemm", 16, 0, 40, 64, torch.float16, torch.device("cuda", 0))
    assert found == Tile(16, 64, 64, 4, 2)


def test_an_entry_for_fp8_weights_is_looked_up_by_its_name(file):
    """Blocks of the reduction divide a block of scales."""
    name, plain = (table.key(kernel, "bfloat16", 768, 2048, 128, 1000) for kernel in W8)
    table.add(file, "A card", "sm_90", "3.6.0", {name: [128, 32, 128, 8, 2, 8]})
    device = torch.device("cuda", 0)
    found = tiles.choose(W8[0], 128, 1000, 768, 2048, torch.bfloat16, device)
    assert found == Tile(128, 32, 128, 8, 2)
    assert chosen() == HEURISTIC
    assert table._valid(plain, [128, 32, 256, 8, 2, 8])
    assert not table._valid(name, [128, 32, 256, 8, 2, 8])


def test_entries_of_a_file(file):
    assert table.entries(file, "A card", "3.6.1") == {}, "it is not there"
    table.add(file, "A card", "sm_90", "3.6.0", {NAME: GOOD})
    assert table.entries(file, "A card", "3.6.1") == {NAME: GOOD}
    assert table.entries(file, "L4", "3.6.1") == table.entries(file, "A card", "3.7.0") == {}
    file.write_text("[")
    assert table.entries(file, "A card", "3.6.1") == {}, "it is broken"


def test_the_interpreter_looks_nothing_up(file, monkeypatch):
    table.add(file, "A card", "sm_90", "3.6.0", {NAME: GOOD})
    monkeypatch.setattr(tiles, "INTERPRET", True)
    assert chosen() == Tile(128, 32, 32, 4, 1)


def test_adding_keeps_other_cards_and_entries(file):
    names = [table.key("gemm", "float32", 8, 8, 64, rows) for rows in (1, 2)]
    table.add(file, "A card", "sm_90", "3.6.0", {names[1]: [64, 16, 16, 4, 1, 8]})
    table.add(file, "L4", "sm_89", "3.6.0", {})
    table.add(file, "A card", "sm_90", "3.6.2", {names[0]: [64, 32, 16, 4, 1, 8]})
    other, mine = table.read(file)
    assert other["card"] == "L4" and not other["tiles"]
    assert mine["triton"] == "3.6.2" and list(mine["tiles"]) == names
    table.add(file, "A card", "sm_90", "3.7.0", {})
    assert table.read(file)[1]["tiles"] == {}, "another Triton, other times"


def test_a_write_is_whole_or_not_at_all(file, monkeypatch):
    table.add(file, "A card", "sm_90", "3.6.0", {NAME: GOOD})
    before = file.read_text()

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(table.os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        table.add(file, "A card", "sm_90", "3.6.0", {})
    assert file.read_text() == before and list(file.parent.iterdir()) == [file]


def test_a_planted_link_is_not_written_through(file, monkeypatch):
    """The temporary file had the process's number in its name, which anybody can foresee."""
    victim = file.with_name("victim")
    victim.write_text("mine")
    for process in range(os.getpid() - 3, os.getpid() + 4):
        file.with_name(f"{file.name}.{process}.tmp").symlink_to(victim)
    planted = set(file.parent.iterdir())
    table.add(file, "A card", "sm_90", "3.6.0", {NAME: GOOD})
    assert victim.read_text() == "mine" and not file.is_symlink()
    assert table.read(file)[0]["tiles"] == {NAME: GOOD}
    assert set(file.parent.iterdir()) == planted | {file}


def test_two_writes_have_temporary_names_of_their_own(file, monkeypatch):
    names, replace = [], os.replace
    monkeypatch.setattr(table.os, "replace", lambda a, b: names.append(str(a)) or replace(a, b))
    for _ in range(2):
        table.add(file, "A card", "sm_90", "3.6.0", {NAME: GOOD})
    assert len(set(names)) == 2
    assert all(os.path.dirname(name) == str(file.parent) for name in names)


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_mode_of_the_file_is_the_usual_one(file, mask, mode):
    before = os.umask(mask)
    try:
        table.add(file, "A card", "sm_90", "3.6.0", {NAME: GOOD})
        assert file.stat().st_mode & 0o777 == mode
        assert os.umask(mask) == mask, "left as it was"
    finally:
        os.umask(before)


def test_buckets_and_places(monkeypatch):
    rows = (0, 1, 2, 3, 4, 5, 1000, 4096, 99_999)
    found = [table.key("gemm", "float16", 1, 2, 3, count).split()[-1] for count in rows]
    assert found == ["r1", "r1", "r2", "r4", "r4", "r8", "r1024", "r4096", "r4096"]
    for kernel in ("dw_gathered", "gate_up_w8", "gemm_w8", "dgate_w8"):
        assert table.KEY.fullmatch(table.key(kernel, "bfloat16", 1, 2, 3, 4))
    for kernel in ("dw_w8", "dw_gathered_w8", "gate_up_w4"):
        assert not table.KEY.fullmatch(table.key(kernel, "bfloat16", 1, 2, 3, 4))
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.delenv("MOE_PATCH_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert str(table.user_file()) == "/h/.cache/moe_patch/tiles.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(table.user_file()) == "/x/moe_patch/tiles.json"
    monkeypatch.setenv("MOE_PATCH_CACHE", "/m")
    assert str(table.user_file()) == "/m/tiles.json"


def test_the_shipped_table_is_valid():
    tables = table.read(table.SHIPPED)
    assert tables and all(one["tiles"] for one in tables)
