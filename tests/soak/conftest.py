"""The command-line fixtures of the plugin's tests."""

from tests.plugin.conftest import (  # noqa: F401
    collect_ignore_glob,
    data_bin,
    plain,
    preprocess_arguments,
    run_cli,
    text_dir,
    train_arguments,
)
