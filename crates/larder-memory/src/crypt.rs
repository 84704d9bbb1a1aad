//! Encryption of disk tiers, which makes a disk unreadable without the state: AES-256-XTS (IEEE 1619) over sectors of
//! 4 KiB, like dm-crypt.
//!
//! The tweak consists of the tier and the sector's position in its log. So no counter has to be kept, or recovered by
//! a successor, and any 16 bytes can be read without the others. Two writes to the same position use the same tweak:
//! an observer of both learns which 16-byte blocks are equal, and no more. (A stream cipher such as CTR or GCM would
//! reveal both contents there.)
//!
//! This module does not authenticate. Each page's checksum, which never leaves memory, verifies the content.

use aes::cipher::{BlockCipherDecrypt as _, BlockCipherEncrypt as _, KeyInit as _};
use aes::{Aes256, Block};
use zeroize::Zeroizing;

use crate::entry::Tier;

/// Length of a key in bytes: one half for the data, one half for the tweaks.
pub const KEY_BYTES: usize = 64;

/// Length of a cipher block in bytes. Ranges begin and end at multiples of it.
pub const BLOCK_BYTES: usize = 16;

/// Length of a sector in bytes. Each sector has its own tweak.
const SECTOR_BYTES: usize = 4096;

/// Number of blocks that are encrypted with one call: more than the processor's pipeline holds.
const BATCH_BLOCKS: usize = 32;

/// Cipher with one key, which is wiped from memory on drop.
pub struct Cipher {
    data: Aes256,
    tweak: Aes256,
}

impl Cipher {
    /// Makes a cipher with this key.
    pub fn new(key: &Zeroizing<[u8; KEY_BYTES]>) -> Self {
        let (halves, _) = key.as_chunks::<{ KEY_BYTES / 2 }>();
        let [data, tweak] = [0, 1].map(|half| Aes256::new((&halves[half]).into()));
        Self { data, tweak }
    }

    /// Encrypts the bytes for offset `at` of a tier's log. Both `at` and the length must be multiples of
    /// [`BLOCK_BYTES`].
    pub fn encrypt(&self, tier: Tier, at: u64, bytes: &mut [u8]) {
        self.for_each_batch(tier, at, bytes, |blocks| self.data.encrypt_blocks(blocks));
    }

    /// Decrypts the bytes from offset `at` of a tier's log. Both `at` and the length must be multiples of
    /// [`BLOCK_BYTES`].
    pub fn decrypt(&self, tier: Tier, at: u64, bytes: &mut [u8]) {
        self.for_each_batch(tier, at, bytes, |blocks| self.data.decrypt_blocks(blocks));
    }

    fn for_each_batch(&self, tier: Tier, at: u64, bytes: &mut [u8], apply: impl Fn(&mut [Block])) {
        debug_assert!(at.is_multiple_of(BLOCK_BYTES as u64) && bytes.len().is_multiple_of(BLOCK_BYTES));
        let mut at = at;
        let mut remaining = bytes;
        while !remaining.is_empty() {
            let within = (at % SECTOR_BYTES as u64) as usize;
            let part_bytes = remaining.len().min(SECTOR_BYTES - within);
            let (sector, after) = std::mem::take(&mut remaining).split_at_mut(part_bytes);
            let mut tweak = self.first_tweak(tier, at / SECTOR_BYTES as u64);
            for _ in 0..within / BLOCK_BYTES {
                tweak = next_tweak(tweak);
            }
            let (blocks, _) = Block::slice_as_chunks_mut(sector);
            for blocks in blocks.chunks_mut(BATCH_BLOCKS) {
                let mut tweaks = [0; BATCH_BLOCKS];
                for slot in &mut tweaks[..blocks.len()] {
                    *slot = tweak;
                    tweak = next_tweak(tweak);
                }
                xor_tweaks(blocks, &tweaks);
                apply(blocks);
                xor_tweaks(blocks, &tweaks);
            }
            at += part_bytes as u64;
            remaining = after;
        }
    }

    fn first_tweak(&self, tier: Tier, sector: u64) -> u128 {
        let tier = match tier {
            Tier::Ram => 0,
            Tier::Ssd => 1,
            Tier::Slow => 2,
        };
        let mut block = Block::from((u128::from(sector) | tier << 64).to_le_bytes());
        self.tweak.encrypt_block(&mut block);
        u128::from_le_bytes(block.0)
    }
}

/// Multiplies by x in GF(2^128), modulo x^128 + x^7 + x^2 + x + 1.
fn next_tweak(tweak: u128) -> u128 {
    (tweak << 1) ^ ((tweak >> 127) * 0x87)
}

fn xor_tweaks(blocks: &mut [Block], tweaks: &[u128; BATCH_BLOCKS]) {
    for (block, tweak) in blocks.iter_mut().zip(tweaks) {
        block.0 = (u128::from_le_bytes(block.0) ^ tweak).to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        let hex: Vec<char> = hex.chars().filter(|digit| !digit.is_whitespace()).collect();
        let digit = |digit: char| digit.to_digit(16).expect("a digit") as u8;
        hex.chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
    }

    fn key(hex: &str) -> Zeroizing<[u8; KEY_BYTES]> {
        Zeroizing::new(bytes(hex).try_into().expect("64 bytes"))
    }

    /// Vector 10 of IEEE 1619-2007, appendix B. Its sector is 0xff and has 512 bytes. The tweaks of a 4 KiB sector
    /// are the same in the first 512 bytes.
    const KEY: &str = "
        2718281828459045235360287471352662497757247093699959574966967627
        3141592653589793238462643383279502884197169399375105820974944592";
    const CIPHERTEXT: &str = "
        1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b
        5d31e276f8fe4a8d66b317f9ac683f44680a86ac35adfc3345befecb4bb188fd
        5776926c49a3095eb108fd1098baec70aaa66999a72a82f27d848b21d4a741b0
        c5cd4d5fff9dac89aeba122961d03a757123e9870f8acf1000020887891429ca
        2a3e7a7d7df7b10355165c8b9a6d0a7de8b062c4500dc4cd120c0f7418dae3d0
        b5781c34803fa75421c790dfe1de1834f280d7667b327f6c8cd7557e12ac3a0f
        93ec05c52e0493ef31a12d3d9260f79a289d6a379bc70c50841473d1a8cc81ec
        583e9645e07b8d9670655ba5bbcfecc6dc3966380ad8fecb17b6ba02469a020a
        84e18e8f84252070c13e9f1f289be54fbc481457778f616015e1327a02b140f1
        505eb309326d68378f8374595c849d84f4c333ec4423885143cb47bd71c5edae
        9be69a2ffeceb1bec9de244fbe15992b11b77c040f12bd8f6a975a44a0f90c29
        a9abc3d4d893927284c58754cce294529f8614dcd2aba991925fedc4ae74ffac
        6e333b93eb4aff0479da9a410e4450e0dd7ae4c6e2910900575da401fc07059f
        645e8b7e9bfdef33943054ff84011493c27b3429eaedb4ed5376441a77ed4385
        1ad77f16f541dfd269d50d6a5f14fb0aab1cbb4c1550be97f7ab4066193c4caa
        773dad38014bd2092fa755c824bb5e54c4f36ffda9fcea70b9c6e693e148c151";

    #[test]
    fn ciphertext_matches_ieee_1619_vector() {
        let cipher = Cipher::new(&key(KEY));
        let plain: Vec<u8> = (0..512).map(|index| index as u8).collect();
        let mut data = plain.clone();
        // Tier 0 is never on a disk, and has the tweaks of the standard.
        cipher.encrypt(Tier::Ram, 0xff * SECTOR_BYTES as u64, &mut data);
        assert_eq!(data, bytes(CIPHERTEXT));
        cipher.decrypt(Tier::Ram, 0xff * SECTOR_BYTES as u64, &mut data);
        assert_eq!(data, plain);
    }

    #[test]
    fn partial_range_is_decrypted_alone() {
        let cipher = Cipher::new(&key(KEY));
        let plain: Vec<u8> = (0..3 * SECTOR_BYTES).map(|index| ((index * 7) >> 3) as u8).collect();
        let mut whole = plain.clone();
        cipher.encrypt(Tier::Ssd, 1 << 20, &mut whole);
        for (from, len) in [(0, 16), (16, 32), (4080, 32), (4096, 4096), (4000, 5008), (8192, 4096)] {
            let mut part = whole[from..from + len].to_vec();
            cipher.decrypt(Tier::Ssd, (1 << 20) + from as u64, &mut part);
            assert_eq!(part, plain[from..from + len], "{len} bytes from {from}");
        }
    }

    #[test]
    fn ciphertext_depends_on_position_and_key() {
        let cipher = Cipher::new(&key(KEY));
        let encrypt_block = |cipher: &Cipher, tier, at| {
            let mut block = [0; BLOCK_BYTES];
            cipher.encrypt(tier, at, &mut block);
            block
        };
        let mut other = key(KEY);
        other[0] ^= 1;
        let all = [
            encrypt_block(&cipher, Tier::Ssd, 0),
            encrypt_block(&cipher, Tier::Slow, 0),
            encrypt_block(&cipher, Tier::Ssd, 16),
            encrypt_block(&cipher, Tier::Ssd, 4096),
            encrypt_block(&Cipher::new(&other), Tier::Ssd, 0),
        ];
        for (index, block) in all.iter().enumerate() {
            assert!(*block != [0; BLOCK_BYTES] && !all[..index].contains(block), "{index}");
        }
    }
}
