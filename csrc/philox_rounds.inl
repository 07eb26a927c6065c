// Philox4x32-7 (Salmon, Moraes, Dror and Shaw, 2011; seven rounds are the fewest that pass BigCrush, they found), of
// 32-bit words or of vectors of them: product(a, b, high, low) multiplies. Included by philox.h, and once for each
// instruction set by norm_cpu_rows.inl: gcc inlines nothing into a function that is for fewer instructions.
template <class Word>
struct PhiloxWords {
  Word word[4];
};
template <class Word, class Product>
FLN_ROUNDS_INLINE PhiloxWords<Word> philox_words(uint64_t key, Word c0, Word c1, Word c2, Word c3, Product product) {
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 7; ++round) {
    Word high0, low0, high1, low1;
    product(0xD2511F53, c0, high0, low0);
    product(0xCD9E8D57, c2, high1, low1);
    c0 = high1 ^ c1 ^ key0;
    c2 = high0 ^ c3 ^ key1;
    c1 = low1;
    c3 = low0;
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}
