"""Model cards: the template that `save_pretrained` fills in, and the cards of recorded runs.

The folder is installed as `hf_qrl.model_cards`, so that `importlib.resources` finds the template.
"""
