"""What `rayspec COMMAND` and the scripts of jobs/ do: one module a command, with `main(arguments) -> exit status`."""
