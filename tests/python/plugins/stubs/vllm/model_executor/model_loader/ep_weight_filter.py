import re


def should_skip_weight(weight_name, local_expert_ids):
    expert = re.search(r"\.experts\.([0-9]+)\..*weight$", weight_name)
    return expert is not None and int(expert[1]) not in local_expert_ids
