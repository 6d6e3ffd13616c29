"""Files that are whole or not there, checksums, and folders that one process owns at a time."""

from gems_flwr.disk.atomic import replacing, write_atomically
from gems_flwr.disk.checksum import CHECKSUM, checksum, verify_checksum
from gems_flwr.disk.faults import disk_faults, file_fault
from gems_flwr.disk.lock import check_held, hold_folder, make_folder

__all__ = [
    "CHECKSUM",
    "check_held",
    "checksum",
    "disk_faults",
    "file_fault",
    "hold_folder",
    "make_folder",
    "replacing",
    "verify_checksum",
    "write_atomically",
]
