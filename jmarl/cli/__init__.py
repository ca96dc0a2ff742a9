"""The command `jmarl`: train, evaluate, plot, report, search, and more, from a terminal. It needs the extra `cli`."""
