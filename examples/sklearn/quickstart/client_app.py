"""What a node does."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from gems_flwr import good_enough_mod  # new
from sklearn.metrics import log_loss

from quickstart.task import create_model, fit, get_params, load_data, set_params


def data(context: Context):
    """Return the node's training and test data."""
    node = context.node_config
    return load_data(int(node["partition-id"]), int(node["num-partitions"]))


app = ClientApp(mods=[good_enough_mod(data)])  # was: ClientApp()


@app.train()
def train(msg: Message, context: Context):
    """Train the model that came, and send it back."""
    model = create_model(float(context.run_config["penalty"]))
    set_params(model, msg.content["arrays"].to_numpy_ndarrays())
    X_train, y_train, _, _ = data(context)  # noqa: N806
    fit(model, X_train, y_train)
    metrics = MetricRecord(
        {
            "num-examples": len(X_train),
            "train_logloss": float(
                log_loss(y_train, model.predict_proba(X_train), labels=[0, 1, 2])
            ),
            "train_accuracy": float(model.score(X_train, y_train)),
        }
    )
    content = RecordDict({"arrays": ArrayRecord(get_params(model)), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Test the model that came on the node's own test data."""
    model = create_model(float(context.run_config["penalty"]))
    set_params(model, msg.content["arrays"].to_numpy_ndarrays())
    _, _, X_test, y_test = data(context)  # noqa: N806
    metrics = MetricRecord(
        {
            "num-examples": len(X_test),
            "test_logloss": float(log_loss(y_test, model.predict_proba(X_test), labels=[0, 1, 2])),
            "accuracy": float(model.score(X_test, y_test)),
        }
    )
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
