"""Secure sums in tests: which message is which, apps that lose some, sessions without Flower."""

from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helpers_grids import kind_of

from gems_flwr import good_enough_mod
from gems_flwr.carriers import MASKS
from gems_flwr.secure import NodeSecrets, SumSession

STAGES = ("secure-keys", "secure-shares", "mask", "secure-opening")


def stage_of(content):
    """Return which message of a secure sum it is; the question's word for any other."""
    return "mask" if MASKS in content else kind_of(content)


def losing(stage, nodes):
    """Return a mod that loses the messages of a stage on some nodes."""

    def mod(message, context, call_next):
        if stage_of(message.content) == stage and context.node_config["partition-id"] in nodes:
            raise ConnectionError("gone")
        return call_next(message, context)

    return mod


def averaging_app(*outer, mod=None, step=0.25, inner=(), limits=None):
    """Return an app whose node i moves weights by ``step (i + 1)`` on 10 (i + 1) examples."""
    client = ClientApp(mods=[*outer, mod or good_enough_mod(limits=limits), *inner])

    @client.train()
    def train(message, context):
        node = context.node_config["partition-id"]
        arrays = message.content["arrays"].to_numpy_ndarrays()
        new = [a + step * (node + 1) if a.dtype.kind == "f" else a + node for a in arrays]
        metrics = MetricRecord({"num-examples": 10 * (node + 1), "train_loss": float(node)})
        content = RecordDict({"arrays": ArrayRecord(new), "metrics": metrics})
        return Message(content, reply_to=message)

    @client.evaluate()
    def evaluate(message, context):
        node = context.node_config["partition-id"]
        metrics = MetricRecord({"num-examples": 10 * (node + 1), "accuracy": node / 10})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return client


def initial_model():
    return ArrayRecord([np.zeros((2, 3), np.float32), np.ones(4), np.array([5, 7])])


def write_keys(folder, count):
    """Write private keys of both kinds, and the public ones into a folder ``trusted``."""
    (folder / "trusted").mkdir()
    open_ssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    for number in range(count):
        key = ec.generate_private_key(ec.SECP384R1())
        key = ed25519.Ed25519PrivateKey.generate() if number % 2 else key
        private = key.private_bytes(serialization.Encoding.PEM, *plain)
        (folder / str(number)).write_bytes(private)
        public = key.public_key().public_bytes(*open_ssh)
        (folder / "trusted" / f"{number}.pub").write_bytes(public)


@dataclass
class Play:
    """All nodes and the server of one session.

    Every node's secrets go to text and back between two stages, as on a deployment.
    """

    nodes: int
    threshold: float = 2 / 3
    degree: int | None = None
    sums: int = 1
    session: str = "s"
    signers: dict = field(default_factory=dict)
    trusted: object = None
    secrets: dict = field(default_factory=dict, init=False)
    server: SumSession = field(default=None, init=False)

    def keep(self, node, secrets):
        self.secrets[node] = secrets.to_json()

    def of(self, node):
        return NodeSecrets.from_json(self.secrets[node])

    def advertise(self, lost=()):
        keys = {}
        for node in range(self.nodes):
            secrets = NodeSecrets.begin(self.session, self.sums, self.signers.get(node))
            self.keep(node, secrets)
            if node not in lost:
                keys[node] = secrets.own
        self.server = SumSession.begin(self.session, keys, self.threshold, self.degree)

    def peers_of(self, node):
        return {peer: self.server.keys[peer] for peer in self.server.neighbours[node]}

    def share(self, lost=()):
        letters = {}
        for node in self.server.keys:
            if node in lost:
                continue
            peers = self.peers_of(node)
            secrets, own = self.of(node).share(node, peers, self.threshold, self.trusted)
            self.keep(node, secrets)
            letters[node] = own
        self.server = self.server.with_letters(letters)

    def mask(self, number, layout, words, lost=()):
        masked = {}
        for node in self.server.members:
            if node in lost:
                continue
            secrets = self.of(node).receive(self.server.letters_for(node))
            present = self.server.present_for(node)
            secrets, masked[node] = secrets.masked(number, layout, words[node], present)
            self.keep(node, secrets)
        return masked

    def reveal(self, number, survivors, lost=()):
        shares = {}
        for node in survivors:
            if node in lost:
                continue
            secrets, shares[node] = self.of(node).reveal(number, sorted(survivors))
            self.keep(node, secrets)
        return shares
