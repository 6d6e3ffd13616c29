"""Signed keys: who is a neighbour is not the server's word."""

import dataclasses

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, x25519
from helpers_secure import Play, write_keys

from gems_flwr.errors import SecureSumError
from gems_flwr.secure import Layout, NodeSecrets, Section, Signer, load_trusted
from gems_flwr.secure.keys import is_signed


def signers(count):
    keys = [
        ed25519.Ed25519PrivateKey.generate() if i % 2 else ec.generate_private_key(ec.SECP384R1())
        for i in range(count)
    ]
    return dict(enumerate(map(Signer, keys)))


def prepared(nodes=4):
    own = signers(nodes)
    trusted = {each.public for each in own.values()}
    return Play(nodes, signers=own, trusted=trusted).advertise()


def suspects(play, **changed):
    """Return whose keys node 0 does not accept, if the server changes some."""
    keys = {**play.server.roster.keys, **{int(node[1:]): each for node, each in changed.items()}}
    return play.of(0).suspects(play.roster(keys), play.trusted)


def test_keys_that_are_not_the_nodes_own_for_this_session_are_found_out():
    """The man in the middle, old keys, and changed ones; the server cannot sign for a node."""
    play = prepared()
    assert not suspects(play)
    assert "not among the 4 trusted ones" in suspects(play, _1=prepared().of(1).own)[1]
    assert "not among the 4" in suspects(play, _1=Play(4).advertise().of(1).own)[1]
    mixed = dataclasses.replace(play.of(1).own, channel=Play(4).advertise().of(1).own.channel)
    old = Play(4, signers=play.signers, session="another").advertise().of(1).own
    for wrong in (mixed, old):
        assert "not by the key that it names" in suspects(play, _1=wrong)[1]


def test_one_signer_cannot_be_two_nodes():
    play = prepared()
    twin = NodeSecrets.begin("s", 1, play.signers[1]).own
    with pytest.raises(SecureSumError, match="sign with the same key"):
        suspects(play, _9=twin)


def test_old_keys_under_a_reused_name_open_nothing():
    """Signed keys of an earlier session of that name pass, but their owners sign another digest."""
    old = prepared()
    play = Play(4, signers=old.signers, trusted=old.trusted).advertise()
    keys = {**old.server.roster.keys, 0: play.of(0).own}
    layout = Layout([Section("x", (1,), 1.0)], 4)
    roster = play.roster(keys)
    assert not play.of(0).suspects(roster, play.trusted)
    play.join(0, roster)
    victim = play.of(0).entered(0, range(4))
    old.mask(0, layout, [layout.encode({"x": [0.5]})] * 4)
    signed = {node: old.sign(node) for node in range(4)}
    with pytest.raises(SecureSumError, match="0 nodes have confirmed"):
        victim.opened(0, range(4), signed, {}, is_checked=True)


def test_a_sum_is_opened_only_if_enough_sign_the_same_list():
    play = prepared(5)
    layout = Layout([Section("x", (1,), 1.0)], 5)
    play.mask(0, layout, [layout.encode({"x": [0.5]})] * 5)
    whole = {node: play.sign(node) for node in range(5)}
    play.shorten(0, [0, 1, 2, 3])
    shorter = {node: play.sign(node) for node in range(4)}
    for signed, why in [
        (whole, "0 nodes have confirmed"),
        ({node: shorter[node] for node in (0, 1, 2)}, "3 nodes have confirmed"),
        ({**shorter, 3: shorter[2]}, "3 nodes have confirmed"),
    ]:
        with pytest.raises(SecureSumError, match=f"{why} who is in the sum, it takes 4"):
            play.of(0).opened(0, [0, 1, 2, 3], signed, {}, is_checked=True)
    with pytest.raises(SecureSumError, match="agreed to another list"):
        play.of(0).opened(0, range(5), whole, {}, is_checked=True)
    assert play.of(0).opened(0, [0, 1, 2, 3], shorter, {}, is_checked=True)[1]


def test_keys_are_read_from_files_of_either_kind(tmp_path):
    write_keys(tmp_path, 2)
    folder = tmp_path / "trusted"
    known = load_trusted(folder)
    for name in "01":
        signer = Signer.load(tmp_path / name)
        assert signer.public in known
        assert is_signed(b"text", signer.sign(b"text"), signer.public)
        assert not is_signed(b"other", signer.sign(b"text"), signer.public)
    for wrong in (b"", b"nonsense"):
        assert not is_signed(b"text", b"", wrong)
    (folder / "c.pem").write_text("nonsense")
    with pytest.raises(SecureSumError, match=r"c\.pem holds no key"):
        load_trusted(folder)
    with pytest.raises(SecureSumError, match="cannot be read"):
        Signer.load(tmp_path / "missing")
    other = x25519.X25519PrivateKey.generate()
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (tmp_path / "0").write_bytes(other.private_bytes(serialization.Encoding.PEM, *plain))
    with pytest.raises(SecureSumError, match="expected an Ed25519 or ECDSA key"):
        Signer.load(tmp_path / "0")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SecureSumError, match="no public key"):
        load_trusted(tmp_path / "empty")
