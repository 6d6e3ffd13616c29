"""What a node does."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from gems_flwr import good_enough_mod  # new

from quickstart.task import Classifier, evaluator, load_data, trainer


def data(context: Context):
    """Return the node's training and test data."""
    node = context.node_config
    return load_data(int(node["partition-id"]), int(node["num-partitions"]))


app = ClientApp(mods=[good_enough_mod(data, model=Classifier)])  # was: ClientApp()


@app.train()
def train(msg: Message, context: Context):
    """Train the model that came, and send it back."""
    net = Classifier()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    train_loader, _ = data(context)
    trainer(net, train_loader)
    metrics = MetricRecord({"num-examples": len(train_loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Test the model that came on the node's own test data."""
    net = Classifier()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, test_loader = data(context)
    loss, accuracy = evaluator(net, test_loader)
    metrics = {"loss": loss, "accuracy": accuracy, "num-examples": len(test_loader.dataset)}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
