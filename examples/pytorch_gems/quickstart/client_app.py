"""What a node does."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from gems_flwr import good_enough_mod

from quickstart.task import Net, accuracy, train, training_data, validation_data

app = ClientApp(mods=[good_enough_mod(validation_data, train=training_data, model=Net)])


@app.train()
def train_handler(message: Message, context: Context) -> Message:
    """Train the model that came, and send it back."""
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = training_data(context)
    loss = train(net, data, float(context.run_config["learning-rate"]))
    metrics = MetricRecord({"loss": loss, "num-examples": len(data.dataset)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate_handler(message: Message, context: Context) -> Message:
    """Test the model that came on the node's own held-out data."""
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = validation_data(context)
    metrics = MetricRecord({"accuracy": accuracy(net, data), "num-examples": len(data.dataset)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
