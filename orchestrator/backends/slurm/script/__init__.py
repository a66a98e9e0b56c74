"""The job script: flags, quoting and text. Pure."""
