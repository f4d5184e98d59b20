"""Feature selection: section 2.2 of the paper as an estimator and as a command."""
