"""What a node does."""

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from gems_flwr import good_enough_mod

from quickstart.task import from_arrays, to_arrays, train, training_data, validation_data

app = ClientApp(mods=[good_enough_mod(validation_data, train=training_data)])


@app.train()
def train_handler(message: Message, context: Context) -> Message:
    """Train the model that came, and send it back."""
    model = from_arrays(message.content["arrays"])
    data = training_data(context)
    train(model, data)
    metrics = MetricRecord({"accuracy": float(model.score(*data)), "num-examples": len(data[1])})
    return Message(RecordDict({"arrays": to_arrays(model), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate_handler(message: Message, context: Context) -> Message:
    """Test the model that came on the node's own held-out data."""
    data = validation_data(context)
    score = float(from_arrays(message.content["arrays"]).score(*data))
    metrics = MetricRecord({"accuracy": score, "num-examples": len(data[1])})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
