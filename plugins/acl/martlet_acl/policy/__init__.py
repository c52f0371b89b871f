"""Rules and their decisions; no input or output.

`resources` has the patterns of resources, `rules` single rules. A `Policy` has the rules of one subject, `members` the
groups of each user. `Policies` has all of them and decides; `explanations` says how. `document` checks the stored form.
"""
