# Scripts that ranks run are no test modules: collecting one for doctests would run it.
collect_ignore_glob = ["*/*_worker.py"]
