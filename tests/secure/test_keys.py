"""Signed keys: who is a neighbour is not the server's word."""

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, x25519
from helpers_secure import Play, write_keys

from gems_flwr.errors import SecureSumError
from gems_flwr.secure import (
    Layout,
    NodeSecrets,
    Section,
    Signer,
    SumSession,
    TrustedKeys,
    fingerprint,
)


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


def test_keys_are_read_from_files_of_either_kind(tmp_path):
    write_keys(tmp_path, 2)
    folder = tmp_path / "trusted"
    known = TrustedKeys.load(folder)
    for name in "01":
        signer = Signer.load(tmp_path / name)
        known.check(signer.fingerprint, b"text", signer.sign(b"text"))
    (folder / "c.pem").write_text("nonsense")
    with pytest.raises(SecureSumError, match=r"c\.pem holds no key"):
        TrustedKeys.load(folder)
    with pytest.raises(SecureSumError, match="cannot be read"):
        Signer.load(tmp_path / "missing")
    other = x25519.X25519PrivateKey.generate()
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (tmp_path / "0").write_bytes(other.private_bytes(serialization.Encoding.PEM, *plain))
    with pytest.raises(SecureSumError, match="expected an Ed25519 or ECDSA key"):
        Signer.load(tmp_path / "0")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SecureSumError, match="no public key"):
        TrustedKeys.load(tmp_path / "empty")
