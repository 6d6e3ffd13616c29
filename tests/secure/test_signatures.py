"""Signed keys: who is a neighbour is not the server's word."""

import dataclasses

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from helpers_secure import Play

from gems_flwr.errors import SecureSumError
from gems_flwr.secure.fixed_point import Layout, Section
from gems_flwr.secure.signatures import Signer, TrustedKeys, fingerprint
from gems_flwr.secure.sum_session import SumSession


def signers(count):
    keys = [
        ed25519.Ed25519PrivateKey.generate() if i % 2 else ec.generate_private_key(ec.SECP384R1())
        for i in range(count)
    ]
    return dict(enumerate(map(Signer, keys)))


def trusted(those):
    keys = [each.key.public_key() for each in those]
    return TrustedKeys({fingerprint(key): key for key in keys})


def prepared(nodes=4):
    own = signers(nodes)
    play = Play(nodes, signers=own, trusted=trusted(own.values()))
    play.advertise()
    return play


def test_keys_that_are_signed_are_taken():
    play = prepared()
    play.share()
    assert play.server.members == (0, 1, 2, 3)


def test_a_server_that_puts_its_own_keys_in_is_found_out():
    """The man in the middle: node 1's keys are replaced by some that the server knows."""
    play = prepared()
    forged = prepared().server.keys[1]
    keys = {**play.server.keys, 1: forged}
    play.server = SumSession.begin("s", keys, play.threshold)
    with pytest.raises(SecureSumError, match="not among the 4 trusted ones"):
        play.share()


def test_a_signature_holds_for_one_session_and_one_set_of_keys():
    play = prepared()
    other = Play(4, signers=play.signers, session="another")
    other.advertise()
    keys = {**play.server.keys, 1: other.server.keys[1]}
    play.server = SumSession.begin("s", keys, play.threshold)
    with pytest.raises(SecureSumError, match="a signature is not by the key"):
        play.share()


def test_one_signer_cannot_be_two_neighbours():
    play = prepared()
    from gems_flwr.secure.node_secrets import NodeSecrets

    twin = NodeSecrets.begin("s", 1, play.signers[1]).own
    play.server = SumSession.begin("s", {**play.server.keys, 9: twin}, play.threshold)
    with pytest.raises(SecureSumError, match="sign with the same key"):
        play.share()


def test_shares_are_given_only_if_the_neighbours_confirm_the_same_survivors():
    """A server that tells some nodes another list cannot show enough signatures of it."""
    play = prepared()
    play.share()
    layout = Layout([Section("x", (1,), 1.0)], 4)
    play.mask(0, layout, [layout.encode({"x": [0.5]})] * 4)
    true, false = [0, 1, 2, 3], [0, 1, 2]
    said = {i: play.of(i).confirm(0, true, play.signers[i]) for i in range(4)}
    with pytest.raises(SecureSumError, match="a signature is not by the key"):
        play.of(0).reveal(0, false, said, play.trusted)
    with pytest.raises(SecureSumError, match="1 nodes of the neighbourhood have confirmed"):
        play.of(0).reveal(0, true, {}, play.trusted)
    _, shares = play.of(0).reveal(0, true, said, play.trusted)
    assert set(shares) == {0, 1, 2, 3}


def test_changed_keys_do_not_fit_their_signature():
    play = prepared()
    own = play.server.keys[2]
    changed = dataclasses.replace(own, channel=bytes(range(32)))
    with pytest.raises(SecureSumError, match="not by the key"):
        changed.check("s", play.trusted)


def test_keys_are_read_from_files_of_either_kind(tmp_path):
    folder = tmp_path / "trusted"
    folder.mkdir()
    for name, signer in zip("ab", signers(2).values(), strict=True):
        public = signer.key.public_key()
        pem = serialization.Encoding.PEM
        (tmp_path / name).write_bytes(
            signer.key.private_bytes(
                pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        text = public.public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        (folder / f"{name}.pub").write_bytes(text)
    known = TrustedKeys.load(folder)
    for name in "ab":
        signer = Signer.load(tmp_path / name)
        known.check(signer.fingerprint, b"text", signer.sign(b"text"))
    (folder / "c.pem").write_text("nonsense")
    with pytest.raises(SecureSumError, match=r"c\.pem holds no key"):
        TrustedKeys.load(folder)
    with pytest.raises(SecureSumError, match="cannot be read"):
        Signer.load(tmp_path / "missing")
