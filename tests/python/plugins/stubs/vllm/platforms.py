class CpuPlatform:
    device_type = "cpu"

    def is_cuda(self):
        return False


current_platform = CpuPlatform()
