"""Every command: arguments in, words out, and nothing else. A command imports what it needs when it runs, so that
`study --help` answers at once; what a command does lives in the room that it calls.
"""
