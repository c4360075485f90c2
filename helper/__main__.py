"""`python -m helper` is `svote-helper`."""

from helper.cli.main import main

main()
