"""`slipstream translate`: settings of verl, slime, prime-rl and TRL as a configuration here, line by line.

names       names.yaml: keys, values and reasons; refusals of unknown keys ask it too
files       which framework wrote a file, and its settings; shell and trl_script read scripts without running them
translation what each setting is here, and which keys the user has to decide
text        what is printed, and the YAML file
"""
