"""Every question that a node of this version can answer; importing this module registers them."""
# ruff: noqa: F401 - they are imported for what importing them does

from __future__ import annotations

import gems_flwr.carriers.masked
import gems_flwr.core.nodes
import gems_flwr.neurons.question
import gems_flwr.spaces.ball.question
import gems_flwr.spaces.cone.question
import gems_flwr.spaces.cone.summed
import gems_flwr.stages.gradients
import gems_flwr.stages.judge
import gems_flwr.strategies.averaging
import gems_flwr.strategies.learner_questions
import gems_flwr.strategies.merged_models
import gems_flwr.strategies.multi_model.question
import gems_flwr.strategies.private_gems
import gems_flwr.strategies.references
