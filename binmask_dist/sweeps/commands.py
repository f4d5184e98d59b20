"""The command of a trial, as `wandb agent` forms it."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from binmask_dist.sweeps.sweep_file import SweepError

FOLDER = "${folder}"


@dataclass(frozen=True)
class Command:
    launcher: list[str]  # up to the program
    program: str
    arguments: list[str]  # after it: what the program itself is told

    @property
    def words(self) -> list[str]:
        return [*self.launcher, self.program, *self.arguments]


def agent_command(
    content: dict[str, Any], setting: dict[str, Any], interpreter: str = sys.executable, folder: Path | None = None
) -> Command:
    """Without a folder it is an agent's: that drops macros which it does not know, and ${folder} is ours.

    Raises SweepError for a command whose program is not told its parameters.
    """
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    template = [str(word) for word in create_sweep_command(list(content.get("command", [])))]
    macros = create_sweep_command_args({"args": {key: {"value": value} for key, value in setting.items()}})
    macros |= {"env": ["/usr/bin/env"], "interpreter": [interpreter], "program": [content["program"]]}
    macros["folder"] = [f"--folder={folder}"] if folder else []
    if "${program}" not in template or "${args}" not in template[template.index("${program}") :]:
        raise SweepError("the command of the sweep file must hold ${program} and, behind it, ${args}")
    place = template.index("${program}")
    if FOLDER in template[:place]:
        raise SweepError(f"{FOLDER} is for the program: put it behind ${{program}} in the command of the sweep file")

    def expand(words: list[str]) -> list[str]:
        return [part for word in words for part in (macros.get(word[2:-1], []) if _is_macro(word) else [word])]

    return Command(expand(template[:place]), content["program"], expand(template[place + 1 :]))


def _is_macro(word: str) -> bool:
    return word.startswith("${") and word.endswith("}")


@dataclass(frozen=True)
class Launch:
    """What `accelerate launch` makes of a trial, or another launcher."""

    processes: int
    on_cpu: bool
    port_is_needed: bool  # several processes meet at a port, and nobody has said at which


def read_launcher(launcher: list[str]) -> Launch:
    """From the words in front of the program, and the file that they name or Accelerate's default one."""
    from accelerate.commands.config.config_args import default_yaml_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    if not (words := _accelerate_words(launcher)):
        return Launch(processes=1, on_cpu=False, port_is_needed=False)
    told = launch_command_parser().parse_args([*words[1:], "program"])
    processes, on_cpu = told.num_processes, told.cpu
    if told.config_file and not Path(told.config_file).is_file():
        raise SweepError(f"the command names {told.config_file}, which is not there; start from the project's folder")
    if told.config_file or os.path.isfile(default_yaml_config_file):
        file = load_config_from_file(told.config_file)
        processes, on_cpu = processes or file.num_processes, on_cpu or file.use_cpu
    processes = processes or 1
    return Launch(processes, on_cpu, port_is_needed=processes > 1 and told.main_process_port is None)


def with_free_port(launcher: list[str]) -> list[str]:
    """Trials on one host must not meet: port 0 is any that is free."""
    place = len(launcher) - len(_accelerate_words(launcher)) + 1
    return [*launcher[:place], "--main_process_port", "0", *launcher[place:]]


def _accelerate_words(launcher: list[str]) -> list[str]:
    """From `launch` on; none if the launcher is another."""
    for place, word in enumerate(launcher):
        if word == "accelerate.commands.launch":
            return launcher[place:]
        if Path(word).name == "accelerate" and launcher[place + 1 : place + 2] == ["launch"]:
            return launcher[place + 1 :]
    return []
