class DeviceConfig:
    device = "cpu"
