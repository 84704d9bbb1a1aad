//! Support for x86_64: registers, the machine code that is needed in the other process, and the signal frame with
//! which a thread restores itself.

use std::arch::x86_64::__cpuid_count;
use std::mem::size_of;

use rustix::io::Errno;

use super::error::InjectError;
use super::tracee::Tracee;

pub(super) const IS_SUPPORTED: bool = true;

/// Size of the area below the stack pointer that signals do not touch (System V ABI, 3.2.2).
pub(super) const RED_ZONE_BYTES: u64 = 128;

/// Machine code that must be found in the process: variants, and a description of each.
pub(super) const INSTRUCTIONS: [(&[&[u8]], &str); 2] = [
    // syscall; ret
    (&[&[0x0f, 0x05, 0xc3]], "a system call that returns"),
    // mov $15, %rax or %eax; syscall. Every program with glibc or musl has one of them, to return from signals.
    (
        &[&[0x48, 0xc7, 0xc0, 15, 0, 0, 0, 0x0f, 0x05], &[0xb8, 15, 0, 0, 0, 0x0f, 0x05]],
        "a return from a signal (rt_sigreturn)",
    ),
];

/// Register sets (linux/elf.h).
const NT_PRSTATUS: usize = 1;
const NT_PRFPREG: usize = 2;
const NT_X86_XSTATE: usize = 0x202;

/// Upper bound of the size of the vector registers: AVX-512 and AMX have 11 KiB.
const VECTOR_REGISTERS_BYTES_MAX: usize = 32 << 10;

/// Code segment of 64-bit programs.
const USER_CS: u64 = 0x33;

const EINTR: u64 = -(libc::EINTR as i64) as u64;

/// Internal error numbers that define how an interrupted call is restarted (linux/errno.h).
const ERESTARTSYS: i64 = 512;
const ERESTARTNOINTR: i64 = 513;
const ERESTARTNOHAND: i64 = 514;
const ERESTART_RESTARTBLOCK: i64 = 516;

const REGISTERS_BYTES: usize = size_of::<libc::user_regs_struct>();

/// Bytes that do not cross a page boundary.
#[repr(align(256))]
struct InOnePage([u8; REGISTERS_BYTES]);
const _: () = assert!(size_of::<InOnePage>() == 256);

/// General registers of a stopped thread.
#[derive(Clone, Copy)]
pub(super) struct Registers(libc::user_regs_struct);

impl Registers {
    pub(super) fn read(tracee: &Tracee) -> Result<Self, InjectError> {
        let mut bytes = [0_u8; REGISTERS_BYTES];
        tracee.register_set(NT_PRSTATUS, &mut bytes)?;
        // SAFETY: the struct consists of plain numbers, for which any bytes are valid, and is as long as `bytes`. The
        // kernel writes fewer bytes for a 32-bit thread, which `is_64_bit` detects: zeros are no code segment.
        Ok(Self(unsafe { std::mem::transmute::<[u8; REGISTERS_BYTES], libc::user_regs_struct>(bytes) }))
    }

    pub(super) fn write(&self, tracee: &Tracee) -> Result<(), InjectError> {
        // SAFETY: the struct is of numbers of 8 bytes each, without padding, and as long as the array.
        let bytes = unsafe { std::mem::transmute::<libc::user_regs_struct, [u8; REGISTERS_BYTES]>(self.0) };
        // The kernel copies one register after the other. If this process is killed meanwhile, the kernel still
        // finishes, unless it finds a page of the buffer missing. The buffer is in one page that was just written to,
        // so all of it is copied or nothing.
        let in_one_page = InOnePage(bytes);
        tracee.set_register_set(NT_PRSTATUS, &in_one_page.0)
    }

    pub(super) fn is_64_bit(&self) -> bool {
        self.0.cs == USER_CS
    }

    pub(super) fn stack_pointer(&self) -> u64 {
        self.0.rsp
    }

    pub(super) fn instruction(&self) -> u64 {
        self.0.rip
    }

    /// Returns the result of a call, or `None` if the call was interrupted and will be restarted.
    pub(super) fn call_result(&self) -> Option<i64> {
        let result = self.0.rax as i64;
        (!(-ERESTART_RESTARTBLOCK..=-ERESTARTSYS).contains(&result)).then_some(result)
    }

    /// Returns these registers, set to make a call with the code at `instruction`, which returns to the address on
    /// the stack at `stack`.
    pub(super) fn for_call(&self, number: i64, arguments: [u64; 6], instruction: u64, stack: u64) -> Self {
        let mut registers = self.0;
        registers.rip = instruction;
        registers.rsp = stack;
        registers.rax = number as u64;
        // The kernel must not restart any call.
        registers.orig_rax = u64::MAX;
        [registers.rdi, registers.rsi, registers.rdx, registers.r10, registers.r8, registers.r9] = arguments;
        Self(registers)
    }

    /// Returns these registers, set as after a call that has returned to the frame at `frame_at`.
    pub(super) fn at_frame(&self, sigreturn: u64, frame_at: u64) -> Self {
        self.for_call(0, [0; 6], sigreturn, frame_at + 8)
    }

    /// Returns true if the call is restarted with restart information that the kernel keeps for the thread.
    pub(super) fn needs_restart_block(&self) -> bool {
        self.0.orig_rax as i64 >= 0 && self.0.rax as i64 == -ERESTART_RESTARTBLOCK
    }

    /// Returns these registers, changed so that the call does not need that restart information.
    pub(super) fn without_restart_block(&self) -> Self {
        if !self.needs_restart_block() {
            return *self;
        }
        let mut registers = self.on_return_to_user();
        registers.orig_rax = u64::MAX;
        Self(registers)
    }

    /// Returns the registers as the kernel leaves them on the way to user mode (`arch_do_signal_or_restart` in
    /// arch/x86/kernel/signal.c). A call that needs restart information is different: `rt_sigreturn` discards it, so
    /// the call ends as with a signal that is handled.
    fn on_return_to_user(&self) -> libc::user_regs_struct {
        let mut registers = self.0;
        if (registers.orig_rax as i64) < 0 {
            return registers;
        }
        match -(registers.rax as i64) {
            ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND => {
                registers.rax = registers.orig_rax;
                registers.rip -= 2;
            }
            // Its timeout is absolute (as in all waits for condition variables), so the call can begin again.
            ERESTART_RESTARTBLOCK if is_absolute_futex_wait(&registers) => {
                registers.rax = registers.orig_rax;
                registers.rip -= 2;
            }
            ERESTART_RESTARTBLOCK => registers.rax = EINTR,
            _ => {}
        }
        registers
    }
}

fn is_absolute_futex_wait(registers: &libc::user_regs_struct) -> bool {
    let operation = registers.rsi as i32 & !(libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME);
    registers.orig_rax == libc::SYS_futex as u64 && operation == libc::FUTEX_WAIT_BITSET
}

/// Vector registers of a stopped thread.
pub(super) enum VectorRegisters {
    /// In the standard format of XSAVE (Intel SDM 1, 13.4), in a buffer large enough for all features of the
    /// processor.
    Xsave(Vec<u8>),
    /// In the format of FXSAVE (Intel SDM 1, 10.5): x87 and SSE. A processor without XSAVE (QEMU's models qemu64 and
    /// kvm64) has no others.
    Fxsave(Vec<u8>),
}

/// Offsets of the bytes for software use, and of the bitmap in which XSAVE reports the features in use.
const SOFTWARE_BYTES_AT: usize = 464;
const IN_USE_AT: usize = 512;
const FXSAVE_BYTES: usize = 512;

/// Magic numbers of the kernel in a signal frame (`struct _fpx_sw_bytes`, asm/sigcontext.h).
const FP_XSTATE_MAGIC1: u32 = 0x4650_5853;
const FP_XSTATE_MAGIC2: u32 = 0x4650_5845;

/// Registers of AMX, for which the kernel allocates space only in threads that use them.
const AMX_TILES: u64 = 1 << 18;

impl VectorRegisters {
    pub(super) fn read(tracee: &Tracee) -> Result<Self, InjectError> {
        match read_register_set(tracee, NT_X86_XSTATE, VECTOR_REGISTERS_BYTES_MAX) {
            // The processor has no XSAVE.
            Err(InjectError::Request { errno: Errno::NODEV, .. }) => Self::read_fxsave(tracee),
            read => Ok(Self::Xsave(read?)),
        }
    }

    fn read_fxsave(tracee: &Tracee) -> Result<Self, InjectError> {
        Ok(Self::Fxsave(read_register_set(tracee, NT_PRFPREG, FXSAVE_BYTES)?))
    }

    /// Returns the registers' part of a signal frame.
    fn to_frame(&self) -> Vec<u8> {
        match self {
            Self::Xsave(bytes) => xsave_to_frame(bytes),
            // The kernel takes a frame without software bytes for this form, on any processor.
            Self::Fxsave(bytes) => {
                let mut bytes = bytes.clone();
                bytes.resize(FXSAVE_BYTES, 0);
                bytes[SOFTWARE_BYTES_AT..].fill(0);
                bytes
            }
        }
    }

    /// Returns the frame's flags for this form.
    fn frame_flags(&self) -> u64 {
        match self {
            Self::Xsave(_) => UC_FP_XSTATE,
            Self::Fxsave(_) => 0,
        }
    }
}

fn read_register_set(tracee: &Tracee, kind: usize, bytes_max: usize) -> Result<Vec<u8>, InjectError> {
    let mut bytes = vec![0; bytes_max];
    let length = tracee.register_set(kind, &mut bytes)?;
    bytes.truncate(length);
    Ok(bytes)
}

/// Returns the registers, with software bytes that describe their features and length, and a magic number at the end.
fn xsave_to_frame(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    // The kernel reports the processor's features at the offset where a frame has its software bytes.
    let all = number_at(&bytes, SOFTWARE_BYTES_AT);
    let ordinary = all & !AMX_TILES;
    let uses_tiles = number_at(&bytes, IN_USE_AT) & AMX_TILES != 0;
    let features = if uses_tiles { all } else { ordinary };
    // The kernel expects the magic number where *this thread's* space for vector registers ends (since 6.8), or where
    // the software bytes say (before). A thread that has used AMX tiles before, but does not now, has the larger
    // space, so the magic number is written there, too.
    let (shorter, longer) = (xsave_bytes(ordinary), bytes.len());
    let length = if uses_tiles { longer } else { shorter.min(longer) };
    bytes.resize(longer + size_of::<u32>(), 0);
    for end in [length, longer] {
        bytes[end..end + 4].copy_from_slice(&FP_XSTATE_MAGIC2.to_ne_bytes());
    }
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    let mut software_bytes = Vec::with_capacity(IN_USE_AT - SOFTWARE_BYTES_AT);
    software_bytes.extend(FP_XSTATE_MAGIC1.to_ne_bytes());
    software_bytes.extend((length + 4).to_ne_bytes());
    software_bytes.extend(features.to_ne_bytes());
    software_bytes.extend(length.to_ne_bytes());
    software_bytes.resize(IN_USE_AT - SOFTWARE_BYTES_AT, 0);
    bytes[SOFTWARE_BYTES_AT..IN_USE_AT].copy_from_slice(&software_bytes);
    bytes
}

fn number_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_ne_bytes)
}

/// Returns the length of the registers of these features in the standard format (CPUID leaf 0xd, Intel SDM 1, 13.2).
fn xsave_bytes(features: u64) -> usize {
    let parts = (2..63).filter(|part| features & (1 << part) != 0).map(|part| {
        // SAFETY: leaf 0xd exists where XSAVE does, from which the features come.
        #[allow(unused_unsafe, reason = "safe in newer versions of Rust")]
        let found = unsafe { __cpuid_count(0xd, part) };
        (found.ebx + found.eax) as usize
    });
    parts.fold(512 + 64, usize::max)
}

/// Frame on the stack of a thread with which it restores itself: the address of the `rt_sigreturn` code, and the rest
/// of a `struct rt_sigframe` (arch/x86/include/asm/sigframe.h).
pub(super) struct Frame {
    pub(super) at: u64,
    pub(super) bytes: Vec<u8>,
}

// Parts of the frame before the vector registers: the return address, `struct ucontext`, `struct siginfo`.
const CONTEXT_BYTES: usize = 304;
const SIGNAL_INFO_BYTES: usize = 128;
const FRAME_BYTES: usize = 8 + CONTEXT_BYTES + SIGNAL_INFO_BYTES;

const UC_FP_XSTATE: u64 = 1;
const UC_SIGCONTEXT_SS: u64 = 2;
const UC_STRICT_RESTORE_SS: u64 = 4;

/// Invalid mode of an alternate stack: `rt_sigreturn` then leaves the thread's alternate stack unchanged.
const NO_STACK_MODE: u64 = 0x7fff_ffff;

impl Frame {
    /// Makes a frame that ends at or below `top`, and that restores registers, vector registers and signal mask.
    pub(super) fn new(
        registers: &Registers,
        vectors: &VectorRegisters,
        mask: u64,
        top: u64,
        sigreturn: u64,
    ) -> Option<Self> {
        let format_flags = vectors.frame_flags();
        let vectors = vectors.to_frame();
        // The alignment that the kernel uses: XRSTOR needs 64 bytes.
        let vectors_at = top.checked_sub(vectors.len() as u64)? & !63;
        let at = (vectors_at.checked_sub(FRAME_BYTES as u64)? & !15).checked_sub(8)?;

        let restored = registers.on_return_to_user();
        let segments = (restored.cs & 0xffff) | (restored.ss & 0xffff) << 48;
        let flags = format_flags | UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS;
        let head = [sigreturn, flags, 0];
        let alternate_stack = [0, NO_STACK_MODE, 0];
        let general = [
            restored.r8,
            restored.r9,
            restored.r10,
            restored.r11,
            restored.r12,
            restored.r13,
            restored.r14,
            restored.r15,
            restored.rdi,
            restored.rsi,
            restored.rbp,
            restored.rbx,
            restored.rdx,
            restored.rax,
            restored.rcx,
            restored.rsp,
            restored.rip,
            restored.eflags,
        ];
        let others = [segments, 0, 0, 0, 0, vectors_at, 0, 0, 0, 0, 0, 0, 0, 0];
        let words = head.iter().chain(&alternate_stack).chain(&general).chain(&others).chain([&mask]);

        let mut bytes: Vec<u8> = words.flat_map(|word| word.to_ne_bytes()).collect();
        debug_assert_eq!(bytes.len(), 8 + CONTEXT_BYTES);
        bytes.resize(usize::try_from(vectors_at - at).ok()?, 0);
        bytes.extend(vectors);
        Some(Self { at, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frame of a processor without XSAVE, where the kernel expects the registers alone.
    #[test]
    fn fxsave_frame_has_no_software_bytes() {
        let vectors = VectorRegisters::Fxsave(vec![0xff; FXSAVE_BYTES]);
        // SAFETY: the struct is of plain numbers.
        let registers = Registers(unsafe { std::mem::zeroed() });
        let top = 0x7fff_0000;
        let frame = Frame::new(&registers, &vectors, 0, top, 0x1000).expect("room");
        let flags = number_at(&frame.bytes, 8);
        assert_eq!(flags & UC_FP_XSTATE, 0);
        let in_frame = &frame.bytes[frame.bytes.len() - FXSAVE_BYTES..];
        assert_eq!((top - FXSAVE_BYTES as u64) % 64, 0);
        assert!(in_frame[..SOFTWARE_BYTES_AT].iter().all(|byte| *byte == 0xff));
        assert!(in_frame[SOFTWARE_BYTES_AT..].iter().all(|byte| *byte == 0));
    }
}
