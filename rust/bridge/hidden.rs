//! C functions of a dependency, which cargo would export from the core.

use std::arch::global_asm;

/// Hides functions from programs that load the core. The linker gives a symbol the strictest visibility of all references.
macro_rules! hide {
    ($($name:ident)*) => { $(global_asm!(concat!(".globl ", stringify!($name), "\n.hidden ", stringify!($name)));)* };
}

// `object_store` requires crc-fast with its C functions.
hide! {
    crc_fast_checksum crc_fast_checksum_combine crc_fast_checksum_combine_with_params crc_fast_checksum_file
    crc_fast_checksum_file_with_params crc_fast_checksum_with_params crc_fast_clear_error crc_fast_crc32_iscsi
    crc_fast_crc32_iso_hdlc crc_fast_crc64_nvme crc_fast_digest_combine crc_fast_digest_finalize
    crc_fast_digest_finalize_reset crc_fast_digest_free crc_fast_digest_get_amount crc_fast_digest_get_state
    crc_fast_digest_new crc_fast_digest_new_with_init_state crc_fast_digest_new_with_params crc_fast_digest_reset
    crc_fast_digest_update crc_fast_error_message crc_fast_get_calculator_target crc_fast_get_custom_params
    crc_fast_get_last_error crc_fast_get_version
}
