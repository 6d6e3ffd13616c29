"""The machinery of rounds, on which every strategy stands.

- `loop`: start, rounds, stop; `settings`, `stopping`: what every strategy can be told.
- `exchange`, `addressing`: messages out, replies in; `nodes`: who is there, under which name.
- `state`: what a run knows; `round_log`: what of that is on disk, and who owns the folder.
- `replay`: a round once more without a reply that broke it. `log`: one line per event.
- `model_averaging`, `local_learners`, `learner_state`, `public_tuning`, `screening`: what several
  strategies share.
"""
