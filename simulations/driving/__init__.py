"""Deep driving in closed loop (Kamp et al. 2018, Section 5 and A.4).

``record`` lets a controller that sees the track drive and writes what the camera saw and how it
steered; `drive` puts trained models behind the wheel on tracks that no model was trained on. The
simulator is `CarRacing-v3` of gymnasium, since the paper's is a program with a screen. It is the
extra ``driving``; nothing here imports it before it is needed.
"""
