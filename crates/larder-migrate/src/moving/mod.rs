//! Moves a VM: QEMU's monitor on both hosts, and what its two movers agree on.
//!
//! ```text
//! source: larder migrate VM --to HOST                    destination: larder migrate receive --qmp
//!   describe QEMU                    -- Prepare -->        compare, set capabilities, let QEMU wait
//!                                    <-- Prepared --       (QEMU will not run of itself: `stop` while it waits)
//!   migrate; QEMU -> sender ============================> receiver -> QEMU
//!   QEMU says completed: stopped, and all is over there
//!                                    -- Go -->             cont
//!                                    <-- Running --
//!   QEMU quits
//! ```
//!
//! Who has the VM, at every moment:
//! - Until `Go` is sent it is the source. Whatever fails before, its QEMU runs on, or is made to.
//! - The destination's QEMU runs only after `Go`.
//! - Once `Go` is sent, the source's QEMU stays stopped, unless the destination says `NotRunning`, which it says only if
//!   its QEMU is gone or not whole, and after which it never starts it. If the link breaks before an answer, the source asks
//!   again, over a new session, until it is answered; asking again does no harm, since the destination looks at its QEMU
//!   and not at what it remembers. Nobody guesses.
//! - Post-copy hands over when the source's QEMU has switched over: from then on neither half is a VM by itself.

mod description;
pub mod destination;
pub mod folder;
pub mod messages;
pub mod source;
pub mod watch;

pub use description::Description;
