"""fairseq plugin: archs ``ls_transformer*``, criteria ``ls_*`` and optimizer ``ls_adam`` under fairseq's own commands.

Importing the package mends what current versions of Python, torch and numpy break in fairseq (see
:mod:`fairseq_plugin.compat`), registers everything, and imports the user's own ``--user-dir`` where a launcher carries
one. fairseq imports it through ``--user-dir fairseq_plugin``; the launchers in :mod:`fairseq_plugin.cli` pass that
option themselves, so spawned ranks import it too.
"""

from fairseq_plugin import compat as _compat

_compat.import_fairseq()
_compat.apply()

from fairseq_plugin import checkpoint, criterion, guards, language_model, model, optimizer, trainer, user_dir  # noqa: E402
from fairseq_plugin.model_options import install as _refuse_options  # noqa: E402

checkpoint.install()
guards.install()
_refuse_options()
trainer.install()
user_dir.import_carried()

__all__ = ["criterion", "language_model", "model", "optimizer"]
