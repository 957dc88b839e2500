"""Tasks of the demos: their problems, and the models that they begin with."""
