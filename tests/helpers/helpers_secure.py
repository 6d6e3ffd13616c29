"""A session of secure sums played without Flower: who drops when is the test's choice."""

from dataclasses import dataclass, field

from gems_flwr.secure.node_secrets import NodeSecrets
from gems_flwr.secure.sum_session import SumSession


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

    def share(self, lost=()):
        letters = {}
        for node in self.server.keys:
            if node in lost:
                continue
            peers = self.server.peers_of(node)
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
