//! What each object needs: a license, and a function for panics.

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // Nothing panics here. The verifier rejects a program that can loop forever.
    loop {}
}

/// The kernel offers its helpers only to programs with a compatible license. The source is
/// Apache-2.0.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
