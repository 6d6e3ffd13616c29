"""What a node does."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from gems_flwr import good_enough_mod  # new

from quickstart.task import Net, load_data
from quickstart.task import test as test_fn
from quickstart.task import train as train_fn


def data(context: Context):
    """Return the node's training and test data."""
    node = context.node_config
    batch_size = int(context.run_config["batch-size"])
    return load_data(int(node["partition-id"]), int(node["num-partitions"]), batch_size)


app = ClientApp(mods=[good_enough_mod(data, model=Net)])  # was: ClientApp()


@app.train()
def train(msg: Message, context: Context):
    """Train the model that came, and send it back."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    trainloader, _ = data(context)
    epochs, lr = int(context.run_config["local-epochs"]), float(msg.content["config"]["lr"])
    loss = train_fn(model, trainloader, epochs, lr, device)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(trainloader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Test the model that came on the node's own test data."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    _, testloader = data(context)
    loss, accuracy = test_fn(model, testloader, device)
    metrics = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(testloader.dataset)}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
