"""The node that ranks run on: its sensors, and the program that runs several ranks of a script of yours."""
