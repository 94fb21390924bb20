import logging

init_logger = logging.getLogger
