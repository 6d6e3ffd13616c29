"""Totals that are kept as whole numbers, and nodes that leave them by a signed difference."""

import dataclasses

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from gems_flwr.__main__ import main
from gems_flwr.errors import SecureSumError, SpaceError
from gems_flwr.intersect.aggregate import aggregate_spaces
from gems_flwr.moments.class_sums import sum_classes
from gems_flwr.moments.cone_building import cone_from_sums
from gems_flwr.moments.small_means import MeanRule
from gems_flwr.moments.total_sums import (
    class_sums_layout,
    class_sums_of,
    class_sums_words,
    total_of,
)
from gems_flwr.offline_totals import write_difference
from gems_flwr.receipts import load_receipts, model_digest
from gems_flwr.secure.fixed_point import Layout, Section
from gems_flwr.secure.kept_total import KeptTotal, TotalNote, load_total, save_total
from gems_flwr.secure.signatures import Signer, TrustedKeys, fingerprint
from gems_flwr.secure.signed_difference import (
    difference_from,
    load_difference,
    save_difference,
    without,
)

NAMES = ("east", "north", "south", "west")
CLASSES, FEATURES = 3, 5
LAYOUT = class_sums_layout(CLASSES, FEATURES, 8, largest=32.0, samples=200)


def node_sums(node, count=40):
    """Class sums of a node; the last one alone has class 2."""
    rng = np.random.default_rng(node)
    y = np.repeat([0, 1, 2] if node == len(NAMES) - 1 else [0, 1], count + 5 * node)
    x = rng.normal(size=(len(y), FEATURES)) + 3 * np.eye(CLASSES, FEATURES)[y]
    return sum_classes([(torch.from_numpy(x), torch.from_numpy(y))], CLASSES)


WORDS = {name: class_sums_words(LAYOUT, node_sums(node)) for node, name in enumerate(NAMES)}


def total_with(names=NAMES):
    return total_of(LAYOUT, LAYOUT.add([WORDS[name] for name in names]), names)


def signer(seed=0):
    return Signer(ed25519.Ed25519PrivateKey.from_private_bytes(bytes([seed] * 32)))


def trusted(*signers):
    return TrustedKeys({fingerprint(s.key.public_key()): s.key.public_key() for s in signers})


def signed(total=None, name="north", who=None):
    total = total or total_with()
    return difference_from(total.note, (name,), WORDS[name]).signed(name, who or signer())


KEYS = {"north": trusted(signer())}


@settings(max_examples=50, deadline=None)
@given(
    nodes=st.integers(2, 12),
    bits=st.sampled_from([8, 12, 16, 24, 32, 64]),
    leaver=st.integers(0, 11),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_total_without_a_node_is_the_total_of_the_others_bit_for_bit(nodes, bits, leaver, seed):
    rng = np.random.default_rng(seed)
    layout = Layout([Section("a", (3, 2), 10.0, bits), Section("b", (4,), 1.0, 32)], nodes)
    words = [
        layout.encode({"a": rng.uniform(-10, 10, (3, 2)), "b": rng.uniform(-1, 1, 4)})
        for _ in range(nodes)
    ]
    names = tuple(str(node) for node in range(nodes))
    gone = leaver % nodes
    total = KeptTotal(layout, layout.add(words), names, {})
    left = difference_from(total.note, (names[gone],), words[gone]).signed(names[gone], signer())
    rest = without(total, left, {names[gone]: trusted(signer())})
    others = layout.add([each for node, each in enumerate(words) if node != gone])
    assert np.array_equal(rest.words, others)
    assert rest.nodes == tuple(name for name in names if name != names[gone])


def layer_of(sums):
    cone = cone_from_sums(sums, min_count=2, mean_rule=MeanRule(1, True))
    return aggregate_spaces([cone]).point


def test_the_moments_without_a_node_are_those_of_the_others_data():
    """Against sums in double precision that never were in a ring, to 1e-9."""
    rest = class_sums_of(without(total_with(), signed(), KEYS))
    others = [node_sums(node) for node, name in enumerate(NAMES) if name != "north"]
    plain = sum(others[1:], others[0])
    assert np.array_equal(rest.counts, plain.counts)
    assert rest.sums == pytest.approx(plain.sums, rel=1e-9, abs=1e-9)
    assert rest.outers == pytest.approx(plain.outers, rel=1e-9, abs=1e-9)
    scratch = class_sums_of(total_with([name for name in NAMES if name != "north"]))
    assert np.array_equal(layer_of(rest), layer_of(scratch))


def test_a_class_that_left_with_its_only_node_is_gone():
    total = total_with()
    left = signed(total, "west")
    rest = class_sums_of(without(total, left, {"west": trusted(signer())}))
    assert rest.counts[2] == 0
    assert not rest.sums[2].any()


def test_several_leave_together_and_all_have_to_sign():
    total, both = total_with(), ("north", "west")
    joint = LAYOUT.add([WORDS[name] for name in both])
    left = difference_from(total.note, both, joint).signed("north", signer())
    keys = {"north": trusted(signer()), "west": trusted(signer(1))}
    with pytest.raises(SecureSumError, match="not signed by west"):
        without(total, left, keys)
    rest = without(total, left.signed("west", signer(1)), keys)
    assert np.array_equal(rest.words, total_with(("east", "south")).words)


def test_a_forged_or_unsigned_difference_is_refused():
    total, left = total_with(), signed()
    unsigned = dataclasses.replace(left, signatures={})
    with pytest.raises(SecureSumError, match="not signed by north"):
        without(total, unsigned, KEYS)
    with pytest.raises(SecureSumError, match="not signed by north"):
        without(total, signed(who=signer(1)), KEYS)
    with pytest.raises(SecureSumError, match=r"name the public key of north.*north\.pub"):
        without(total, left, {})
    # Signed, but other numbers, another node, or another total than was signed.
    other = dataclasses.replace(left, words=WORDS["south"])
    with pytest.raises(SecureSumError, match="not signed by north"):
        without(total, other, KEYS)
    in_another_name = dataclasses.replace(
        left, nodes=("south",), signatures={"south": left.signatures["north"]}
    )
    with pytest.raises(SecureSumError, match="not signed by south"):
        without(total, in_another_name, {"south": trusted(signer(1))})
    smaller = total_with(("north", "south"))
    with pytest.raises(SecureSumError, match="has to sign it anew"):
        without(smaller, left, KEYS)


def test_nobody_leaves_twice_or_last():
    total = total_with()
    rest = without(total, signed(), KEYS)
    with pytest.raises(SecureSumError, match="has to sign it anew"):
        without(rest, signed(), KEYS)
    with pytest.raises(SecureSumError, match=r"\['north'\] are not in the total"):
        difference_from(rest.note, ("north",), WORDS["north"])
    alone = total_with(("north",))
    with pytest.raises(SecureSumError, match="nobody would be left"):
        without(alone, signed(alone), KEYS)


def test_what_cannot_be_the_total_of_the_others_is_refused():
    """A node that takes out more than it had added; its signature is good."""
    total = total_with()
    more = LAYOUT.add([WORDS["north"], WORDS["south"], WORDS["east"], WORDS["west"]])
    left = difference_from(total.note, ("north",), LAYOUT.add([more, WORDS["north"]]))
    rest = without(total, left.signed("north", signer()), KEYS)
    with pytest.raises(SpaceError, match="counts: expected at least 0"):
        class_sums_of(rest)
    # As many samples as it had, and far more spread.
    values = LAYOUT.decode(WORDS["north"])
    wide = LAYOUT.encode({**values, "outers": values["outers"] * 20})
    left = difference_from(total.note, ("north",), wide).signed("north", signer())
    with pytest.raises(SpaceError, match="a negative variance"):
        class_sums_of(without(total, left, KEYS))


def test_words_that_are_no_elements_of_the_rings_are_refused():
    layout = Layout([Section("a", (2,), 1.0, 16)], 2)
    with pytest.raises(SpaceError, match="elements of the rings"):
        KeptTotal(layout, np.array([1, 2**20], dtype=np.uint64), ("a",), {})
    with pytest.raises(SpaceError, match="2 numbers of 64 bits"):
        KeptTotal(layout, np.zeros(3, dtype=np.uint64), ("a",), {})
    with pytest.raises(SecureSumError, match="1 to 2 different nodes"):
        KeptTotal(layout, np.zeros(2, dtype=np.uint64), ("a", "a"), {})
    other = KeptTotal(layout, np.zeros(2, dtype=np.uint64), ("a",), {})
    with pytest.raises(SecureSumError, match="a total of class sums is needed"):
        class_sums_of(other)


def test_files_hold_what_was_written_and_notice_damage(tmp_path):
    path, total = tmp_path / "total.safetensors", total_with()
    save_total(path, total)
    assert path.stat().st_mode & 0o077 == 0
    again = load_total(path)
    assert np.array_equal(again.words, total.words)
    assert again.note == total.note == TotalNote.from_json(total.note.to_json())
    save_difference(tmp_path / "north.safetensors", signed())
    left = load_difference(tmp_path / "north.safetensors")
    assert np.array_equal(without(again, left, KEYS).words, without(total, signed(), KEYS).words)
    with pytest.raises(SecureSumError, match="expected gems-difference"):
        load_difference(path)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(SecureSumError, match="damaged"):
        load_total(path)
    with pytest.raises(SecureSumError, match="cannot be read"):
        load_total(tmp_path / "none.safetensors")
    with pytest.raises(SecureSumError, match="cannot be read"):
        TotalNote.from_json("{}")


def write_key(path, private):
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    path.write_bytes(private.public_key().public_bytes(serialization.Encoding.PEM, form))


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa"])
def test_the_command_takes_a_node_out_of_a_total(tmp_path, capsys, kind):
    private = signer(7).key if kind == "ed25519" else ec.generate_private_key(ec.SECP384R1())
    write_key(tmp_path / "north.pub", private)
    path, output = tmp_path / "total.safetensors", tmp_path / "m.safetensors"
    save_total(path, total_with())
    command = ["aggregate", "--total", str(path), "-o", str(output)]
    assert main(command) == 0
    before = load_file(output)
    capsys.readouterr()
    main(["show", str(path)])
    note = TotalNote.from_json(capsys.readouterr().out.partition("that leave: ")[2] or "{}")
    left = difference_from(note, ("north",), class_sums_words(note.layout, node_sums(1)))
    file = tmp_path / "north.safetensors"
    save_difference(file, left)
    leave = [*command, "--remove", "north", "--difference", str(file)]
    leave += ["--key", str(tmp_path / "north.pub")]
    assert main(leave) == 2
    assert "not signed by north" in capsys.readouterr().err
    assert load_total(path).nodes == NAMES
    save_difference(file, left.signed("north", Signer(private)))
    assert main(leave) == 0
    said = capsys.readouterr().out
    assert "the total of 3 nodes" in said
    others = [name for name in NAMES if name != "north"]
    save_total(tmp_path / "others.safetensors", total_with(others))
    scratch = tmp_path / "scratch.safetensors"
    main(["aggregate", "--total", str(tmp_path / "others.safetensors"), "-o", str(scratch)])
    assert output.read_bytes() == scratch.read_bytes()
    assert np.array_equal(load_total(path).words, total_with(others).words)
    [receipt] = load_receipts(tmp_path / "m.receipts.json")
    assert receipt.removed == {"north": left.digest}
    assert receipt.remaining == dict.fromkeys(others)
    assert receipt.model_before == model_digest(before)
    assert receipt.model_after == model_digest(load_file(output))
    assert note.digest in receipt.note
    assert "has what the leaver had added" in said
    # The same difference again, and options that do not belong together.
    assert main(leave) == 2
    assert main([*command, "--remove", "south"]) == 2
    assert main([*command, "--add"]) == 2
    assert main(["aggregate", "x.safetensors", "-o", str(output), "--difference", str(file)]) == 2


def test_a_node_writes_its_difference_in_one_call(tmp_path):
    rng = np.random.default_rng(5)
    x, y = torch.from_numpy(rng.normal(size=(60, FEATURES))), torch.arange(60) % CLASSES
    words = class_sums_words(LAYOUT, sum_classes([(x, y)], CLASSES))
    total = total_of(LAYOUT, LAYOUT.add([words, WORDS["south"]]), ("north", "south"))
    private = signer(3).key
    form = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    key = tmp_path / "north.pem"
    key.write_bytes(private.private_bytes(serialization.Encoding.PEM, *form))
    file = tmp_path / "north.safetensors"
    write_difference(total.note.to_json(), x, y, node="north", key=key, output=file)
    rest = without(total, load_difference(file), {"north": trusted(Signer(private))})
    assert np.array_equal(rest.words, WORDS["south"])
