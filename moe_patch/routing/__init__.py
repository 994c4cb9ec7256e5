"""What a model's routers choose: recorded, replayed, counted and balanced.

layers.py finds the MoE layers and watches them; a watcher is a recording, a replay or a load.
choosing.py sees a router's choice, recomputed.py knows forwards that gradient checkpointing runs
again, forwards.py which tokens are padding.
"""
