//! A loop that holds a pattern in all registers, and detects any change of them.

use std::arch::{asm, is_x86_feature_detected};

/// Bytes below the stack pointer that are filled and checked: the area that signals do not touch, or more than an
/// injected call needs.
pub(crate) const RED_ZONE_BYTES: usize = 128;
pub(crate) const DEEP_BYTES: usize = 24 << 10;

const VECTORS_BYTES: usize = 32 * 64;

/// Puts patterns derived from `seed` into the general registers, the vector registers and `below` bytes below the
/// stack pointer, spins for a while, and checks all of them.
pub(crate) fn hold(seed: u64, below: usize) {
    let mut pattern = [0_u8; VECTORS_BYTES];
    for (at, byte) in pattern.iter_mut().enumerate() {
        *byte = (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (at % 57)) as u8 ^ at as u8;
    }
    let mut found = [0_u8; VECTORS_BYTES];
    let (bytes, wrong) = if is_x86_feature_detected!("avx512f") {
        (VECTORS_BYTES, hold_avx512(&pattern, &mut found, below))
    } else if is_x86_feature_detected!("avx") {
        (16 * 32, hold_avx(&pattern, &mut found, below))
    } else {
        (16 * 16, hold_sse(&pattern, &mut found, below))
    };
    assert_eq!(wrong, 0, "1: memory below the stack has changed; 2: a general register");
    assert!(found[..bytes] == pattern[..bytes], "a vector register has changed");
}

/// Number of iterations of the inner loop.
const SPINS: u64 = 100_000;

macro_rules! hold {
    ($pattern:ident, $found:ident, $below:ident, [$($load:literal)*], [$($store:literal)*]) => {{
        let wrong: u64;
        // SAFETY: `$pattern` and `$found` are as long as the loads and stores. The memory below the stack pointer is
        // unused, as the block is not marked to leave the stack alone, and is within the stack, of which far less is
        // in use. All registers that are written and that the compiler may use are declared.
        unsafe {
            asm!(
                $($load,)*
                // Each word below the stack pointer holds its own address.
                "lea r8, [rsp - 8]",
                "2: mov [r8], r8",
                "sub r8, 8",
                "sub rdx, 8",
                "jnz 2b",
                "mov r9, 0x1111111111111111",
                "mov r10, 0x2222222222222222",
                "mov r11, 0x3333333333333333",
                "mov r12, 0x4444444444444444",
                "mov r13, 0x5555555555555555",
                "mov r14, 0x6666666666666666",
                "mov r15, 0x7777777777777777",
                "3: dec rcx",
                "jnz 3b",
                "4: add r8, 8",
                "cmp [r8], r8",
                "jne 5f",
                "lea rdx, [rsp - 8]",
                "cmp r8, rdx",
                "jne 4b",
                "mov rdx, 0x1111111111111111",
                "sub r9, rdx",
                "mov rdx, 0x2222222222222222",
                "sub r10, rdx",
                "or r9, r10",
                "mov rdx, 0x3333333333333333",
                "sub r11, rdx",
                "or r9, r11",
                "mov rdx, 0x4444444444444444",
                "sub r12, rdx",
                "or r9, r12",
                "mov rdx, 0x5555555555555555",
                "sub r13, rdx",
                "or r9, r13",
                "mov rdx, 0x6666666666666666",
                "sub r14, rdx",
                "or r9, r14",
                "mov rdx, 0x7777777777777777",
                "sub r15, rdx",
                "or r9, r15",
                "jnz 6f",
                "xor eax, eax",
                "jmp 7f",
                "5: mov eax, 1",
                "jmp 7f",
                "6: mov eax, 2",
                "7:",
                $($store,)*
                in("rdi") $pattern.as_ptr(),
                in("rsi") $found.as_mut_ptr(),
                inout("rdx") $below => _,
                inout("rcx") SPINS => _,
                out("rax") wrong,
                out("r8") _, out("r9") _, out("r10") _, out("r11") _,
                out("r12") _, out("r13") _, out("r14") _, out("r15") _,
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
            );
        }
        wrong
    }};
}

#[rustfmt::skip]
fn hold_avx(pattern: &[u8; VECTORS_BYTES], found: &mut [u8; VECTORS_BYTES], below: usize) -> u64 {
    hold!(
        pattern,
        found,
        below,
        [
            "vmovdqu ymm0, [rdi + 0]"
            "vmovdqu ymm1, [rdi + 32]"
            "vmovdqu ymm2, [rdi + 64]"
            "vmovdqu ymm3, [rdi + 96]"
            "vmovdqu ymm4, [rdi + 128]"
            "vmovdqu ymm5, [rdi + 160]"
            "vmovdqu ymm6, [rdi + 192]"
            "vmovdqu ymm7, [rdi + 224]"
            "vmovdqu ymm8, [rdi + 256]"
            "vmovdqu ymm9, [rdi + 288]"
            "vmovdqu ymm10, [rdi + 320]"
            "vmovdqu ymm11, [rdi + 352]"
            "vmovdqu ymm12, [rdi + 384]"
            "vmovdqu ymm13, [rdi + 416]"
            "vmovdqu ymm14, [rdi + 448]"
            "vmovdqu ymm15, [rdi + 480]"
        ],
        [
            "vmovdqu [rsi + 0], ymm0"
            "vmovdqu [rsi + 32], ymm1"
            "vmovdqu [rsi + 64], ymm2"
            "vmovdqu [rsi + 96], ymm3"
            "vmovdqu [rsi + 128], ymm4"
            "vmovdqu [rsi + 160], ymm5"
            "vmovdqu [rsi + 192], ymm6"
            "vmovdqu [rsi + 224], ymm7"
            "vmovdqu [rsi + 256], ymm8"
            "vmovdqu [rsi + 288], ymm9"
            "vmovdqu [rsi + 320], ymm10"
            "vmovdqu [rsi + 352], ymm11"
            "vmovdqu [rsi + 384], ymm12"
            "vmovdqu [rsi + 416], ymm13"
            "vmovdqu [rsi + 448], ymm14"
            "vmovdqu [rsi + 480], ymm15"
            "vzeroupper"
        ]
    )
}

// The compiler does not use zmm16 to zmm31 here, because it builds for all processors.
#[rustfmt::skip]
fn hold_avx512(pattern: &[u8; VECTORS_BYTES], found: &mut [u8; VECTORS_BYTES], below: usize) -> u64 {
    hold!(
        pattern,
        found,
        below,
        [
            "vmovdqu64 zmm0, [rdi + 0]"
            "vmovdqu64 zmm1, [rdi + 64]"
            "vmovdqu64 zmm2, [rdi + 128]"
            "vmovdqu64 zmm3, [rdi + 192]"
            "vmovdqu64 zmm4, [rdi + 256]"
            "vmovdqu64 zmm5, [rdi + 320]"
            "vmovdqu64 zmm6, [rdi + 384]"
            "vmovdqu64 zmm7, [rdi + 448]"
            "vmovdqu64 zmm8, [rdi + 512]"
            "vmovdqu64 zmm9, [rdi + 576]"
            "vmovdqu64 zmm10, [rdi + 640]"
            "vmovdqu64 zmm11, [rdi + 704]"
            "vmovdqu64 zmm12, [rdi + 768]"
            "vmovdqu64 zmm13, [rdi + 832]"
            "vmovdqu64 zmm14, [rdi + 896]"
            "vmovdqu64 zmm15, [rdi + 960]"
            "vmovdqu64 zmm16, [rdi + 1024]"
            "vmovdqu64 zmm17, [rdi + 1088]"
            "vmovdqu64 zmm18, [rdi + 1152]"
            "vmovdqu64 zmm19, [rdi + 1216]"
            "vmovdqu64 zmm20, [rdi + 1280]"
            "vmovdqu64 zmm21, [rdi + 1344]"
            "vmovdqu64 zmm22, [rdi + 1408]"
            "vmovdqu64 zmm23, [rdi + 1472]"
            "vmovdqu64 zmm24, [rdi + 1536]"
            "vmovdqu64 zmm25, [rdi + 1600]"
            "vmovdqu64 zmm26, [rdi + 1664]"
            "vmovdqu64 zmm27, [rdi + 1728]"
            "vmovdqu64 zmm28, [rdi + 1792]"
            "vmovdqu64 zmm29, [rdi + 1856]"
            "vmovdqu64 zmm30, [rdi + 1920]"
            "vmovdqu64 zmm31, [rdi + 1984]"
        ],
        [
            "vmovdqu64 [rsi + 0], zmm0"
            "vmovdqu64 [rsi + 64], zmm1"
            "vmovdqu64 [rsi + 128], zmm2"
            "vmovdqu64 [rsi + 192], zmm3"
            "vmovdqu64 [rsi + 256], zmm4"
            "vmovdqu64 [rsi + 320], zmm5"
            "vmovdqu64 [rsi + 384], zmm6"
            "vmovdqu64 [rsi + 448], zmm7"
            "vmovdqu64 [rsi + 512], zmm8"
            "vmovdqu64 [rsi + 576], zmm9"
            "vmovdqu64 [rsi + 640], zmm10"
            "vmovdqu64 [rsi + 704], zmm11"
            "vmovdqu64 [rsi + 768], zmm12"
            "vmovdqu64 [rsi + 832], zmm13"
            "vmovdqu64 [rsi + 896], zmm14"
            "vmovdqu64 [rsi + 960], zmm15"
            "vmovdqu64 [rsi + 1024], zmm16"
            "vmovdqu64 [rsi + 1088], zmm17"
            "vmovdqu64 [rsi + 1152], zmm18"
            "vmovdqu64 [rsi + 1216], zmm19"
            "vmovdqu64 [rsi + 1280], zmm20"
            "vmovdqu64 [rsi + 1344], zmm21"
            "vmovdqu64 [rsi + 1408], zmm22"
            "vmovdqu64 [rsi + 1472], zmm23"
            "vmovdqu64 [rsi + 1536], zmm24"
            "vmovdqu64 [rsi + 1600], zmm25"
            "vmovdqu64 [rsi + 1664], zmm26"
            "vmovdqu64 [rsi + 1728], zmm27"
            "vmovdqu64 [rsi + 1792], zmm28"
            "vmovdqu64 [rsi + 1856], zmm29"
            "vmovdqu64 [rsi + 1920], zmm30"
            "vmovdqu64 [rsi + 1984], zmm31"
            "vzeroupper"
        ]
    )
}

#[rustfmt::skip]
fn hold_sse(pattern: &[u8; VECTORS_BYTES], found: &mut [u8; VECTORS_BYTES], below: usize) -> u64 {
    hold!(
        pattern,
        found,
        below,
        [
            "movdqu xmm0, [rdi + 0]"
            "movdqu xmm1, [rdi + 16]"
            "movdqu xmm2, [rdi + 32]"
            "movdqu xmm3, [rdi + 48]"
            "movdqu xmm4, [rdi + 64]"
            "movdqu xmm5, [rdi + 80]"
            "movdqu xmm6, [rdi + 96]"
            "movdqu xmm7, [rdi + 112]"
            "movdqu xmm8, [rdi + 128]"
            "movdqu xmm9, [rdi + 144]"
            "movdqu xmm10, [rdi + 160]"
            "movdqu xmm11, [rdi + 176]"
            "movdqu xmm12, [rdi + 192]"
            "movdqu xmm13, [rdi + 208]"
            "movdqu xmm14, [rdi + 224]"
            "movdqu xmm15, [rdi + 240]"
        ],
        [
            "movdqu [rsi + 0], xmm0"
            "movdqu [rsi + 16], xmm1"
            "movdqu [rsi + 32], xmm2"
            "movdqu [rsi + 48], xmm3"
            "movdqu [rsi + 64], xmm4"
            "movdqu [rsi + 80], xmm5"
            "movdqu [rsi + 96], xmm6"
            "movdqu [rsi + 112], xmm7"
            "movdqu [rsi + 128], xmm8"
            "movdqu [rsi + 144], xmm9"
            "movdqu [rsi + 160], xmm10"
            "movdqu [rsi + 176], xmm11"
            "movdqu [rsi + 192], xmm12"
            "movdqu [rsi + 208], xmm13"
            "movdqu [rsi + 224], xmm14"
            "movdqu [rsi + 240], xmm15"
        ]
    )
}
