//! The memory of a running VM, from outside its process: kept within a budget, what is cold in compressed RAM and on an
//! SSD, and brought back when it is touched.

pub mod inject;
