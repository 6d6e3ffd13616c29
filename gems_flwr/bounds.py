"""How much of anything a node can send: every limit on a reply, and why it is there.

A limit is not a judgement of quality. It is far above what an honest node can have, and low enough
that what passes can be added up over all nodes and rounds without becoming infinite, fits a file
name, a log line or an integer of 64 bits, and costs the server no more than the reply itself.
Everything that unpacks a reply or builds a space takes its limits from here.
"""

from __future__ import annotations

# --- weights --------------------------------------------------------------------------------

# Weights, radii, inputs of a linear layer and their means; their squares are second moments. With
# the largest of them a margin is exact to six digits in double precision.
MAX_WEIGHT = 1e6
MAX_MOMENT = MAX_WEIGHT**2
# Any number of any array. Its square is finite in double precision, its mean in single.
MAX_VALUE = 1e30
# How far one training moves a weight away from what the server sent. A model that others have
# spoilt may be larger than that: who trains it honestly must not be refused for it.
MAX_STEP = 1e20
# A mean gradient, by which SCAFFOLD corrects the steps of all other nodes. A larger one counts as
# that much; it is not refused, for on a model that others have spoilt honest ones are large.
MAX_GRADIENT = 1e9
# A hidden neuron, by length, in units of the longest that the server sent or that most nodes have.
# Trained neurons are within ten of each other; one of a million makes every input of the next layer
# useless, for everybody.
MAX_NEURON_RATIO = 30.0
# Axes of an ellipsoid, and radii that others are divided by. Quotients of it with MAX_WEIGHT are
# finite, squared too.
MIN_RADIUS = 1e-30

# --- counts ---------------------------------------------------------------------------------

# Examples of one node, and of all nodes together: whole numbers up to that are exact in doubles.
MAX_EXAMPLES = 10**12
MAX_POOLED_EXAMPLES = 10**15
# Weights in means need not be whole, but one that vanishes beside the others may sum to zero.
MIN_EXAMPLES = 1e-6
MAX_CLASSES = 10**6
MAX_FEATURES = 10**7
# Models that a node trains in a round.
MAX_CAPACITY = 10**6
# Steps of training that a learner does for one message.
MAX_STEPS = 10_000
# Directions that a radius is looked for in: 500 in the papers, and each is a pass over the data.
MAX_DIRECTIONS = 100_000
# What a class falls into at most, clusters or random groups; each has moments of its own.
MAX_PIECES = 1000
# Random columns of a sketch, which a node multiplies its data with: 20 by default.
MAX_COLUMNS = 10_000
# Points along a step at which a node sums up its loss; refinement asks for 39.
MAX_POINTS = 100
# Numbers of a model that a server sends, and how many times those of a node's own network they may
# be beyond that: merged layers are wider than the node's, up to as many times as there are nodes.
MAX_PARAMETERS = 10**7
MAX_GROWTH = 20
# Numbers of all matrices that a node builds for an answer: 800 MB, of ten classes 3,162 features.
MAX_ENTRIES = 10**8
# Points of a curve of radii.
MAX_CURVE_POINTS = 1001
# Sums over rounds and nodes stay finite, and so do their squares.
MAX_METRIC = 1e100
# Numbers in all lists of a reply's metrics: their mean is in the history and in every result.
MAX_LISTED_METRICS = 100_000

# --- texts and bytes ------------------------------------------------------------------------

# A space's description is some hundred characters; withheld classes can make it longer.
MAX_JSON_CHARACTERS = 1_000_000
MAX_NAME_CHARACTERS = 100
# A traceback fits; a node cannot fill the log and the history with its reasons.
MAX_REASON_CHARACTERS = 4000
# What a node says of a single model of several.
MAX_NOTE_CHARACTERS = 500
# Of most file systems. A name of 100 characters can be 1,200 bytes once it is quoted.
MAX_FILE_NAME_BYTES = 255
# numpy's .npy header is at most a few hundred bytes for the arrays that we accept.
MAX_NPY_HEADER_BYTES = 4096
