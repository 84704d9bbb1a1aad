//! Substitute on architectures that are not supported: no thread is ever stopped.

use super::error::InjectError;
use super::tracee::Tracee;

pub(super) const IS_SUPPORTED: bool = false;
pub(super) const RED_ZONE_BYTES: u64 = 0;
pub(super) const INSTRUCTIONS: [(&[&[u8]], &str); 2] = [(&[], ""), (&[], "")];

#[derive(Clone, Copy)]
pub(super) struct Registers;

impl Registers {
    pub(super) fn read(_: &Tracee) -> Result<Self, InjectError> {
        Err(InjectError::UnsupportedArchitecture)
    }

    pub(super) fn write(&self, _: &Tracee) -> Result<(), InjectError> {
        Err(InjectError::UnsupportedArchitecture)
    }

    pub(super) fn is_64_bit(&self) -> bool {
        false
    }

    pub(super) fn stack_pointer(&self) -> u64 {
        0
    }

    pub(super) fn instruction(&self) -> u64 {
        0
    }

    pub(super) fn call_result(&self) -> Option<i64> {
        None
    }

    pub(super) fn at_frame(&self, _: u64, _: u64) -> Self {
        *self
    }

    pub(super) fn needs_restart_block(&self) -> bool {
        false
    }

    pub(super) fn without_restart_block(&self) -> Self {
        *self
    }

    pub(super) fn for_call(&self, _: i64, _: [u64; 6], _: u64, _: u64) -> Self {
        *self
    }
}

pub(super) struct VectorRegisters;

impl VectorRegisters {
    pub(super) fn read(_: &Tracee) -> Result<Self, InjectError> {
        Err(InjectError::UnsupportedArchitecture)
    }
}

pub(super) struct Frame {
    pub(super) at: u64,
    pub(super) bytes: Vec<u8>,
}

impl Frame {
    pub(super) fn new(_: &Registers, _: &VectorRegisters, _: u64, _: u64, _: u64) -> Option<Self> {
        None
    }
}
