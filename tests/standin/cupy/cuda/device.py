from . import Device, current_device_id

get_device_id = current_device_id
__all__ = ["Device", "get_device_id"]
